"""The entry point of `qvlopt` and of `python -m qvlopt`: Ctrl-C ends it quietly while it is still loading and when it is done already."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from typing import NoReturn


def main() -> None:
    """Runs the command line on the words that were typed and exits with its status."""
    try:
        from qvlopt.cli.app import main as command_line

        command_line()
    except KeyboardInterrupt:
        _leave(130)
    except SystemExit as end:
        _leave(end.code)


def _leave(code: int | str | None) -> NoReturn:
    """Ends with the status that the command has earned: an interrupt from now on hurries the end, it does not turn it into a death by signal."""
    status = code if isinstance(code, int) else int(code is not None)  # as sys.exit takes it: text is printed and means 1
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: os._exit(status))
        atexit.register(signal.signal, number, signal.SIG_IGN)  # the interpreter gives its own handlers up before it is gone
    sys.exit(code)


if __name__ == "__main__":
    main()
