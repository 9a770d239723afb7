"""Successes into runbooks: plan, review, replay."""
