"""Sums up what a program's processes say of themselves when they end."""

import json
import os
from collections import Counter
from types import TracebackType
from typing import Any, Self

from scheduler.api import Counts

_SUMS = (
    "graph_calls",
    "graph_operators",
    "local_operators",
    "bytes_in",
    "bytes_out",
    "queue_s",
    "transfer_s",
    "compute_s",
    "trace_s",
)


class Tally:
    """A place for the processes' lines, in memory: nothing is left of it, however we end."""

    def __enter__(self) -> Self:
        self._lines = os.memfd_create("gpufaas-stats", os.MFD_CLOEXEC)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._lines)

    @property
    def path(self) -> str:
        """Where a process appends its line."""
        return f"/proc/{os.getpid()}/fd/{self._lines}"

    def sums(self, counts: Counts) -> dict[str, Any]:
        """One object for the whole program, with what the GPU manager counted."""
        size = os.fstat(self._lines).st_size
        lines = os.pread(self._lines, size, 0).decode(errors="replace").splitlines()
        processes = [json.loads(line) for line in lines]
        local: Counter[str] = Counter()
        for process in processes:
            local.update(process.get("local_calls", {}))
        sums = {name: sum(process.get(name, 0) for process in processes) for name in _SUMS}
        return {
            "graph_calls": sums.pop("graph_calls"),
            "local_calls": dict(local.most_common()),
            **sums,
            "processes": len(processes),
            "loads": counts.misses + counts.prefetches,
            "hits": counts.hits,
            "evictions": counts.evictions,
        }
