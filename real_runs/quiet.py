"""How much of the machine others used while something was measured."""

from __future__ import annotations

import os
import time
from pathlib import Path

_STAT = Path("/proc/stat")


class ForeignLoad:
    """Measures the cores that processes other than this one kept busy since it was made."""

    def __init__(self) -> None:
        self._busy, self._own, self._wall = _busy_seconds(), _own_seconds(), time.perf_counter()

    def cores(self) -> float | None:
        """Busy cores of others on average, stolen time included; None where the system does not tell."""
        busy = _busy_seconds()
        if busy is None or self._busy is None:
            return None
        others = busy - self._busy - (_own_seconds() - self._own)
        return max(0.0, others) / max(time.perf_counter() - self._wall, 1e-9)


def _own_seconds() -> float:
    times = os.times()
    return times.user + times.system


def _busy_seconds() -> float | None:
    if not _STAT.is_file():
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, _STAT.read_text().split(maxsplit=9)[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
