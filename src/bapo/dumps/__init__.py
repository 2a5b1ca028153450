"""Reads logged batches of any trainer into one form. Imports no torch."""
