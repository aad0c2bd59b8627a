"""Counts that the shim reports when a program's processes end, summed for the program."""

import json
import os
from collections import Counter
from typing import Any, Self

from scheduler.api import DecisionCounts

_SUMS = (
    "graph_calls",
    "recorded_calls",
    "graph_operators",
    "local_operators",
    "bytes_in",
    "bytes_out",
    "queue_s",
    "transfer_s",
    "compute_s",
    "trace_s",
)


class ReportFile:
    """A file in memory to which processes append a JSON object each; it vanishes when closed."""

    def __enter__(self) -> Self:
        self._descriptor = os.memfd_create("gpufaas-stats", os.MFD_CLOEXEC)
        return self

    def __exit__(self, *failure: object) -> None:
        os.close(self._descriptor)

    @property
    def path(self) -> str:
        """The path at which other processes open the file."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def reports(self) -> list[dict[str, Any]]:
        size = os.fstat(self._descriptor).st_size
        text = os.pread(self._descriptor, size, 0).decode(errors="replace")
        return [json.loads(line) for line in text.splitlines()]


def summed_counts(reports: list[dict[str, Any]], counts: DecisionCounts | None) -> dict[str, Any]:
    """One object for the whole program, with the counts of a GPU manager that had it alone."""
    local: Counter[str] = Counter()
    unrecorded: Counter[str] = Counter()
    for report in reports:
        local.update(report.get("local_calls", {}))
        unrecorded.update(report.get("unrecorded_calls", {}))
    sums = {name: sum(report.get(name, 0) for report in reports) for name in _SUMS}
    of_manager = (
        {}
        if counts is None
        else {
            "loads": counts.misses + counts.prefetches,
            "hits": counts.hits,
            "evictions": counts.evictions,
        }
    )
    return {
        "graph_calls": sums.pop("graph_calls"),
        "local_calls": dict(local.most_common()),
        "unrecorded_calls": dict(unrecorded.most_common()),
        **sums,
        "processes": len(reports),
        **of_manager,
    }
