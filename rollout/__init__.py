"""Host side of trsi-jax: tasks, sandboxes, harnesses, engines over HTTP, rewriting, the store.

Imports numpy, tensorstore, docker and http clients; never jax, flax or optax.
"""
