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
    """Asks the process. One that fails is said once and asked no more: nothing is known of the machine's speed then."""

    def __init__(self, process: Asked, threads: int) -> None:
        self._process: Asked | None = process
        self._threads = threads

    def pace(self) -> dict[str, float]:
        """The processors' usual rates at this moment (timing.probes.measure_pace); empty when they cannot be measured."""
        return dict(self._asked({"do": "pace"}).get("rates", {}))

    def limits(self, dtypes: Sequence[str], device: str) -> Limits | None:
        """The best rates of `device`; None when there is nothing to multiply or they cannot be measured."""
        found = self._asked({"do": "probe", "dtypes": list(dtypes), "device": device}) if dtypes else {}
        return Limits(found["operations_per_s"], found["bytes_per_s"]) if found else None

    def _asked(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        if self._process is None:
            return {}
        try:
            return self._process.ask({**message, "threads": self._threads})
        except RunError as error:
            log.warning("the machine's speed could not be measured: %s", error)
            self._process = None
            return {}


@contextmanager
def machine_probe(open_process: OpenProcess, threads: int) -> Iterator[MachineProbe]:
    """A probe that uses so many threads, and whose process ends with the block."""
    with open_process(threads) as process:
        yield MachineProbe(process, threads)
        with suppress(RunError):
            process.ask({"do": "close"})
