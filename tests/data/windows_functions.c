// What NumPy and pydantic import from Windows, and wine 8 lacks. Other functions of the math library are forwarded to it.
#include <math.h>
#include <stddef.h>

typedef struct { float real, imag; } Complex64;
typedef struct { double real, imag; } Complex128;

float own_crealf(Complex64 z) { return z.real; }
float own_cimagf(Complex64 z) { return z.imag; }
double own_creal(Complex128 z) { return z.real; }
double own_cimag(Complex128 z) { return z.imag; }
float own_cabsf(Complex64 z) { return (float)hypot(z.real, z.imag); }
double own_cabs(Complex128 z) { return hypot(z.real, z.imag); }

unsigned char SystemFunction036(void *bytes, unsigned long count);
int own_ProcessPrng(unsigned char *bytes, size_t count) { return SystemFunction036(bytes, (unsigned long)count); }
