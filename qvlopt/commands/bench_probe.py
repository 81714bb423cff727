"""How fast the machine is, from a process of its own that sleeps while engines are measured."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from qvlopt.commands.bench_process import Asked, OpenProcess
from qvlopt.errors import RunError
from qvlopt.timing.roofline import Limits

log = logging.getLogger(__name__)


class MachineProbe:
    """Asks the process. What fails is said once; what cannot be measured says nothing of the machine."""

    def __init__(self, process: Asked, threads: int) -> None:
        self._process = process
        self._threads = threads
        self._has_failed = False

    def pace(self) -> dict[str, float]:
        """The processors' usual rates at this moment (timing.probes.measure_pace); empty when they cannot be measured."""
        return dict(self._asked({"do": "pace"}).get("rates", {}))

    def limits(self, dtypes: Sequence[str], device: str) -> Limits | None:
        """The best rates of `device`; None when there is nothing to multiply or they cannot be measured."""
        found = self._asked({"do": "probe", "dtypes": list(dtypes), "device": device}) if dtypes else {}
        return Limits(found["operations_per_s"], found["bytes_per_s"]) if found else None

    def _asked(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            return self._process.ask({**message, "threads": self._threads})
        except RunError as error:
            if not self._has_failed:
                log.warning("the machine's speed could not be measured: %s", error)
            self._has_failed = True
            return {}


@contextmanager
def machine_probe(open_process: OpenProcess, threads: int) -> Iterator[MachineProbe]:
    """A probe that uses so many threads, and whose process ends with the block."""
    with open_process(threads) as process:
        yield MachineProbe(process, threads)
        with suppress(RunError):
            process.ask({"do": "close"})
