"""Analyse recordings."""
