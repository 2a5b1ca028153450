"""Consumes groups of scored responses and takes updates. Knows nothing about who sampled them, or how."""
