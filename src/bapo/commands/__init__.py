"""Commands that are more than a call: training, and what helps to begin with it. `cli.py` lists all commands."""
