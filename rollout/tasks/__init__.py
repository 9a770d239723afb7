"""Tasks, verifiers and splits."""
