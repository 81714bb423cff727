"""What commands that end with a report folder do alike: its place is checked before the work, its document begins alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import qvlopt
from qvlopt.artifact.process import is_another_alive
from qvlopt.errors import RunError, UsageError
from qvlopt.report.write import prepare_parent

SCHEMA_VERSION = 1


def document_head(command: str) -> dict[str, Any]:
    """The keys that say whose document it is."""
    return {"schema_version": SCHEMA_VERSION, "tool": "qvlopt", "version": qvlopt.__version__, "command": command}


def check_report_place(parent: Path) -> None:
    """Raises UsageError or RunError, before the work, when no report could be written below `parent`."""
    if parent.exists() and not parent.is_dir():
        raise UsageError(f"{parent} is not a folder", "move it away, or choose another --output")
    try:
        prepare_parent(parent, is_alive=is_another_alive)
    except OSError as error:
        raise RunError(f"no report can be written below {parent}: {error.strerror}", "choose another --output") from error
