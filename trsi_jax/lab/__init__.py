"""The laboratory: estimators compared on the same trajectories."""
