"""Run directories: how they are written and read, and what their numbers mean. Nothing here imports torch."""
