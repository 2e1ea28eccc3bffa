"""Diagnose a model by experiment: `regard.doctor` runs it on changed inputs and compares the outputs.

`subject` calls the model, `call_log` records each call with the projections around it, and the other modules each make
some experiments. The package imports `regard.lens.watch`, `regard.lens.analysis` and below.
"""
