"""Data sets from anywhere, read into problems and demonstrations."""
