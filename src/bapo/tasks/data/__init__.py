"""Data sets from anywhere, read into problems and demonstrations."""

from bapo.tasks.data.demonstrations import load_demonstrations
from bapo.tasks.data.problems import fingerprint, load_problems, within, without_overlap

__all__ = ["fingerprint", "load_demonstrations", "load_problems", "within", "without_overlap"]
