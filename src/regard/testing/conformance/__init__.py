"""The conformance kit: call any attention function with probe inputs, and name the faults that explain its results.

Entry point: `check_conformance`, exported by `regard.testing`. Imports `regard.testing.cases` and the packages below.

Design notes:
- A fault is the definition with one step replaced, not a pattern of symptoms. The kit computes what a function with
  exactly that fault returns, and picks, one by one, the fault that explains most results under the error rule.
- Faults of different steps compose, so two faults are two findings. Results that no fault reproduces become one finding
  about what the failing calls have in common.
- Inputs are multiples of 1/4, exact in every dtype, and shrink while the finding still shows. Gradients are judged only
  if the output is right.
"""
