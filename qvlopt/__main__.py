"""`python -m qvlopt`, the same as `qvlopt`."""

from qvlopt.cli.app import main

main()
