"""Capture attention calls while a model runs: wrap the functions that models call, and record their arguments.

The lens, diagnosis, interventions, the monitor and `regard.transformers` all capture by this package: `wrappers`
notifies the watchers of a module, `record.build_call` turns captured arguments into a `Call`, and `cache_joining` joins
the calls of one cache. Imports `regard.core`, `regard.distributed`, `regard.models` and below.
"""
