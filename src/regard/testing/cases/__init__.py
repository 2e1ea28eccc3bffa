"""The generated case matrix."""
