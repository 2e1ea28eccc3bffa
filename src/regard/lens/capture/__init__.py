"""Capture attention calls while a model runs: wrap the functions that models call, and record their arguments.

`wrappers` notifies the watchers of a module, `record.build_call` turns captured arguments into a `Call`, and
`cache_joining` joins the calls of one cache. Imports from `regard.core` and below, not from the rest of the lens.
"""
