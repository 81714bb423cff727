"""Settings of every test: no network, no user's cache, few threads, and examples that do not depend on the clock."""

from __future__ import annotations

import os
import signal

# Before torch is imported anywhere: tests run in several processes, and one thread each is the fastest on few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", TOKENIZERS_PARALLELISM="false", TQDM_DISABLE="1")

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("qvlopt", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("qvlopt")

# A shell's background jobs ignore interrupts, and so would the tests that interrupt themselves and the processes they start.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QVLOPT_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    # Some commands refuse things in CI; a test that wants that says so.
    monkeypatch.delenv("CI", raising=False)
    # Nor do tests write into the job that they run in, or know a key.
    for name in ("GITHUB_STEP_SUMMARY", "GITHUB_OUTPUT", "QVLOPT_API_KEY"):
        monkeypatch.delenv(name, raising=False)
