"""Turn loops between an engine and a sandbox."""
