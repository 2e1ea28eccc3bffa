"""What can be run: each file says how; `examples.induction` is a package, to be imported."""
