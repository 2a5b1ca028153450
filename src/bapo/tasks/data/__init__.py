"""Data sets from files and from the hub, read into problems and demonstrations."""
