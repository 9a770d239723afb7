"""Strict success, progress and their intervals."""
