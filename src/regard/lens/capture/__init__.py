"""Capture attention calls."""
