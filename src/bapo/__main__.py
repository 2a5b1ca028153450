"""`python -m bapo`: the `bapo` command, for torchrun, which starts modules.

Python then looks for modules in the current directory before all others, so a file there, such as json.py, would run.
This is stopped before anything else is imported.
"""

import sys

if not sys.flags.safe_path and __name__ == "__main__":
    del sys.path[0]

from bapo.cli import main

main()
