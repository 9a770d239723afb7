"""The architecture of Qwen3.8: definitions, weights in and out, decoding."""
