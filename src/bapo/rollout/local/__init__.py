"""The engine that samples from any transformers model, on any device."""
