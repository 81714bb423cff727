"""The entry point of `qvlopt` and of `python -m qvlopt`: Ctrl-C ends it quietly even while it is still loading."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command line on the words that were typed and exits with its status."""
    try:
        from qvlopt.cli.app import main as command_line

        command_line()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
