"""Runs many programs: in lanes beside each other, each with processes that it forks.

A lane takes a batch of programs that import the same libraries, starts one plain process and one
under `gpufaas exec` which import them, and runs the batch in forks of these two. A program that
brings such a process down has failed; the next program gets a new one.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import SimpleQueue

from compat.entry import GROUPS, Entry
from compat.run import Report, Settings, run_entry, under_exec
from compat.warm import WarmRunner

_BATCH = 25  # programs of one process, which then ends with what its node keeps of them


def run_in_lanes(
    entries: Sequence[Entry], folder: Path, settings: Settings, lanes: int, within_s: float
) -> Iterator[Report]:
    """Every entry's report as it comes; none of those that the time did not suffice for."""
    reports: SimpleQueue[Report | None] = SimpleQueue()
    stopped = threading.Event()
    run = partial(
        _run_batch,
        folder=folder,
        settings=settings,
        until_s=time.monotonic() + within_s,
        stopped=stopped,
        report=reports.put,
    )
    with ThreadPoolExecutor(lanes) as pool:
        running = [pool.submit(run, batch) for batch in batches(entries)]
        for lane in running:
            lane.add_done_callback(lambda _: reports.put(None))
        try:
            yield from _until_all_ended(reports, len(running))
        finally:
            stopped.set()  # whoever was interrupted does not wait for what is left
        for lane in running:
            lane.result()


def batches(entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    """Entries of one group each, the largest groups first."""
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(entry.group, []).append(entry)
    for alike in sorted(groups.values(), key=len, reverse=True):
        for first in range(0, len(alike), _BATCH):
            yield alike[first : first + _BATCH]


def _until_all_ended(reports: SimpleQueue[Report | None], running: int) -> Iterator[Report]:
    """The reports that the batches put there, each of which puts none at its end."""
    while running:
        found = reports.get()
        if found is None:
            running -= 1
        else:
            yield found


def _run_batch(
    batch: Sequence[Entry],
    folder: Path,
    settings: Settings,
    until_s: float,
    stopped: threading.Event,
    report: Callable[[Report], None],
) -> None:
    modules = GROUPS[batch[0].group]
    with (
        WarmRunner(settings, modules) as natively,
        WarmRunner(settings, modules, under_exec(settings)) as remotely,
    ):
        for entry in batch:
            if stopped.is_set() or time.monotonic() > until_s:
                return
            own = folder / entry.name.replace("/", "_").replace(" ", "-")
            report(run_entry(entry, own, natively, remotely))
