"""The generated task pool."""
