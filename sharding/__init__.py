"""Device meshes, partition rules and layouts of trsi-jax. Imports jax only."""
