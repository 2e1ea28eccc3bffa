"""The lazy attention matrix."""
