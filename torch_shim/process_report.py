"""The shim's counts for one process, written as one line of JSON when the process ends."""

import atexit
import json
import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing import util
from typing import NamedTuple

from torch_shim.advice import CodePlace, for_break, for_local, told_places, users_line

log = logging.getLogger("gpufaas")

_NO_MODULE = "no module and no function under torch.compile is called"
_ENOUGH_ANSWERS = 3  # of a function that has used no module yet: it may do so in others

_MOST_LOGGED = 200  # reasons; a program may make as many as it has calls


class GraphBreak(NamedTuple):
    """The reason why a graph ended before its module did, and the line."""

    file: str
    line: int
    reason: str


@dataclass(slots=True)
class ProcessCounts:
    """Sums over one process."""

    graph_calls: int = 0
    local_calls: dict[str, int] = field(default_factory=dict)
    graph_operators: int = 0
    local_operators: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    queue_s: float = 0.0
    load_s: float = 0.0
    transfer_s: float = 0.0
    compute_s: float = 0.0
    trace_s: float = 0.0
    graphs: int = 0
    acquires: int = 0
    repeated_calls: int = 0
    recorded_calls: int = 0  # of the graph calls, those that repeat a recorded one
    unrecorded_calls: dict[str, int] = field(default_factory=dict)  # that cannot be, by reason
    breaks: list["GraphBreak"] = field(default_factory=list)


class ProcessReport:
    """The counts of this process; each reason for running locally is logged once."""

    def __init__(self) -> None:
        self.counts = ProcessCounts()
        self._lock = threading.Lock()
        self._logged: set[tuple[str, str, CodePlace | None]] = set()
        self._place: CodePlace | None = None  # of the first operator on a GPU tensor
        self._waits_for_module = False
        self._serves = False
        self._answers = 0

    def expect_calls(self) -> None:
        """This process serves calls: one that has had none tells nothing of the program."""
        self._serves = True

    def expect_modules(self) -> None:
        """Tell, at the latest when this process ends, that it captures nothing of what it does."""
        self._waits_for_module = True
        atexit.register(self._tell_of_no_module)

    def note_operator(self) -> None:
        """Remember where the program computes with GPU tensors itself."""
        if self._place is None:
            self._place = users_line()

    def note_answer(self) -> None:
        """Count an answer of the function; after some, tell what it would tell at its end."""
        if self._waits_for_module:
            self._answers += 1
            if self._answers >= _ENOUGH_ANSWERS:
                self._tell_of_no_module()

    def _tell_of_no_module(self) -> None:
        place, counts = self._place, self.counts
        if place is None or (self._serves and not self._answers):
            return
        self._waits_for_module = False
        if counts.graph_calls or counts.local_calls:
            return
        self.local_call(_NO_MODULE, 0, "the program")
        what = "the program runs on the function's own processor"
        told_places.tell(place, what, for_local(_NO_MODULE))

    def unrecorded_call(self, reason: str) -> None:
        """Count a graph call that cannot be recorded, and why."""
        with self._lock:
            calls = self.counts.unrecorded_calls
            calls[reason] = calls.get(reason, 0) + 1

    def graph_call(
        self,
        operators: int,
        sent: int,
        received: int,
        times: Sequence[float],
        *,
        recorded: bool = False,
    ) -> None:
        with self._lock:
            counts = self.counts
            counts.recorded_calls += recorded
            counts.graph_calls += 1
            counts.graph_operators += operators
            counts.bytes_in += sent
            counts.bytes_out += received
            counts.queue_s += times[0]
            counts.transfer_s += times[1]
            counts.compute_s += times[2]

    def local_call(
        self, reason: str, operators: int, what: str = "a call", place: CodePlace | None = None
    ) -> None:
        """Count work of a model that ran on the function's own processor, and tell it once.

        `place` is the line of what cannot run elsewhere, where that is known.
        """
        key = (reason, what, place)
        with self._lock:
            calls = self.counts.local_calls
            calls[reason] = calls.get(reason, 0) + 1
            self.counts.local_operators += operators
            first = key not in self._logged and len(self._logged) < _MOST_LOGGED
            if first:
                self._logged.add(key)
        if first:
            log.info("%s runs on the function's own processor: %s", what, reason)
        if first and operators:
            what = f"{what} runs on the function's own processor"
            told_places.tell(place or users_line(), what, for_local(reason))

    def graph_break(self, graph_break: GraphBreak) -> None:
        """Record each line and reason once."""
        with self._lock:
            is_known = graph_break in self.counts.breaks
            if not is_known:
                self.counts.breaks.append(graph_break)
        if not is_known:
            place = CodePlace(graph_break.file, graph_break.line)
            told_places.tell(place, "a graph ends here", for_break(graph_break.reason))

    def add(self, **amounts: float) -> None:
        with self._lock:
            for name, amount in amounts.items():
                setattr(self.counts, name, getattr(self.counts, name) + amount)

    def as_json(self) -> str:
        """Return the counts as the line that `gpufaas exec --stats` sums up."""
        with self._lock:
            return json.dumps(asdict(self.counts) | {"process": os.getpid()})

    def clear(self) -> None:
        """Reset all counts, for a forked child."""
        self.counts = ProcessCounts()
        self._lock = threading.Lock()
        self._answers = 0
        told_places.after_fork()

    def write_at_exit(self, path: str) -> None:
        """Write the line when this process ends, and one line for each of its child processes."""
        atexit.register(self.write, path)
        # A child of multiprocessing skips atexit handlers and its parent's finalizers.
        util.register_after_fork(
            self, lambda mine: util.Finalize(None, mine.write, (path,), exitpriority=0)
        )

    def write(self, path: str) -> None:
        """Append the line to a file that several processes append to."""
        counts = self.counts
        if not (counts.graph_calls or counts.local_calls or counts.local_operators):
            return
        line = (self.as_json() + "\n").encode()
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, line)
        finally:
            os.close(descriptor)


report = ProcessReport()
