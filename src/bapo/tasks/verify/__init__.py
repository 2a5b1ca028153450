"""Verifiers, which score responses: mathematics in sandboxed processes, and functions of the user's own."""
