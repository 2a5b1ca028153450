"""Takes updates on groups of scored responses. Knows nothing about what sampled them, or how."""
