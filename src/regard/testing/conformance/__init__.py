"""The conformance kit: call any attention function with probe inputs, and name the faults that explain its results.

Entry point: `check_conformance`, exported by `regard.testing`. Imports `regard.testing.cases` and the packages below.
"""
