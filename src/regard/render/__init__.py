"""Views: pure functions from arrays and plain records to text and pages."""
