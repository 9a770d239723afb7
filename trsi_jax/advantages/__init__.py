"""Advantage estimators: pure functions of one sequence."""
