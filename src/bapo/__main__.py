"""`python -m bapo`: the `bapo` command, for torchrun, which starts modules."""

from bapo.cli import main

main()
