"""Examples to run; each file says how. `examples.induction` is a package to import."""
