"""Verifiers: is a response right? They run in processes of their own."""
