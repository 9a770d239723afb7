"""The trajectory store."""
