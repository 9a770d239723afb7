"""Terminal-RSI in JAX: a terminal agent made better from its own verified work."""
