"""An index in memory of all records in the stream: jobs and dead letters; pure.

Every gateway has one. It receives each message that the stream delivers and each that this gateway
wrote, and ignores messages older than those it has. The stream alone decides about a claim, as it
accepts a write only if the record was not changed in between: an index that lags behind costs one
refused write, and nothing else.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

from gateway_ext.jobs.queue import JobTally
from gateway_ext.jobs.values import JobKind, JobLane, JobNumber, LaneHead
from gateway_ext.model import FunctionId
from gateway_ext.shared_jobs.records import JobRecord, RecordState, StoredParts

_ALIVE = frozenset({RecordState.WAITING, RecordState.CLAIMED})
# Stands for the record of every job that is gone: there are as many as end within minutes.
_MARK = JobRecord(
    number=JobNumber(0),
    function=FunctionId("", ""),
    call_id="",
    queued_at_s=0.0,
    call=StoredParts(0, (), 0),
    state=RecordState.GONE,
    lane=JobLane(JobKind.CALL, ""),
    due_at_s=0.0,
)


@dataclass(slots=True)
class IndexEntry:
    """The record at a subject, its sequence number, and the last full reading that saw it.

    That of a job that is gone is a mark.
    """

    subject: str
    seq: int
    record: JobRecord
    reading: int = 0

    @property
    def alive(self) -> bool:
        return self.record.state in _ALIVE

    @property
    def gone(self) -> bool:
        return self.record.state is RecordState.GONE


class LaneCandidate(NamedTuple):
    """A job as it was when it was added; its record may have changed since."""

    due_at_s: float
    number: JobNumber
    subject: str
    seq: int


class JobIndex:
    """`me` is this gateway's session; `lives` tells whether another session holds its claims."""

    def __init__(self, tally: JobTally, me: str, lives: Callable[[str], bool]) -> None:
        self.tally = tally
        self.position = 0
        self.watchers: list[Callable[[], None]] = []
        # Marks that no clean-up has taken yet: subject, sequence number, the session that left it.
        self.marks: list[tuple[str, int, str]] = []
        # Messages that a full reading found before newer ones of their subjects, which should have
        # replaced them: subject, sequence number.
        self.outdated: list[tuple[str, int]] = []
        # Subjects of messages that cannot be decoded, for example those of a later version.
        self.unread: set[str] = set()
        self._me = me
        self._lives = lives
        self._entries: dict[str, IndexEntry] = {}
        self._alive: dict[JobNumber, str] = {}
        self._dead: dict[JobNumber, str] = {}
        self._claimed: defaultdict[str, set[str]] = defaultdict(set)
        self._reserved: set[str] = set()
        self._lanes: dict[JobLane, list[LaneCandidate]] = {}  # heaps
        self._reading = 0
        self._is_reading = False

    # -- queries ---------------------------------------------------------------------------------

    def heads(self, kind: JobKind) -> list[LaneHead]:
        lanes = [lane for lane in self._lanes if lane.kind == kind]
        firsts = [(lane, self._first(lane)) for lane in lanes]
        return [LaneHead(lane, first.due_at_s) for lane, first in firsts if first is not None]

    def take(self, lane: JobLane, now_s: float) -> IndexEntry | None:
        """The first due job of a lane, reserved for a claim by this gateway until `release`."""
        first = self._first(lane)
        if first is None or first.due_at_s > now_s:
            return None
        heappop(self._lanes[lane])
        self._reserved.add(first.subject)
        return self._entries[first.subject]

    def release(self, subject: str) -> None:
        self._reserved.discard(subject)
        self._offer(subject)

    def alive(self, subject: str) -> IndexEntry | None:
        entry = self._entries.get(subject)
        return entry if entry is not None and entry.alive else None

    def is_alive(self, number: JobNumber) -> bool:
        return number in self._alive

    def dead(self, number: JobNumber) -> IndexEntry | None:
        subject = self._dead.get(number)
        return None if subject is None else self._entries[subject]

    def dead_after(self, after: int, limit: int) -> list[JobRecord]:
        numbers = sorted(number for number in self._dead if number > after)
        return [self._entries[self._dead[number]].record for number in numbers[:limit]]

    def mark_of(self, subject: str) -> int:
        """The sequence number of the mark at a subject; 0 where there is none."""
        entry = self._entries.get(subject)
        return entry.seq if entry is not None and entry.gone else 0

    def seq_of(self, subject: str) -> int:
        entry = self._entries.get(subject)
        return 0 if entry is None else entry.seq

    def uids(self) -> set[str]:
        return {entry.record.uid for entry in self._entries.values() if not entry.gone}

    def halves(self) -> list[IndexEntry]:
        """Letters whose move or replay was interrupted by the end of a gateway."""
        entries = []
        for number, subject in self._dead.items():
            entry = self._entries[subject]
            if number in self._alive or not is_dead_subject(subject):
                entries.append(entry)
        return entries

    def letters(self) -> list[IndexEntry]:
        return [self._entries[subject] for subject in self._dead.values()]

    def claimers(self) -> list[str]:
        return list(self._claimed)

    # -- changes ---------------------------------------------------------------------------------

    def apply(self, subject: str, seq: int, record: JobRecord) -> None:
        known = self._entries.get(subject)
        kept = _MARK if record.state is RecordState.GONE else record
        if known is not None:
            # A full reading wins: servers that lost their power may have lost newer messages.
            is_unseen = known.reading != self._reading
            if seq < known.seq and not is_unseen:
                return
            if seq == known.seq and not (is_unseen and known.record != kept):
                known.reading = self._reading
                return
            if self._is_reading and not is_unseen:
                self.outdated.append((subject, known.seq))
        self._put(IndexEntry(subject, seq, kept, self._reading))
        if kept is _MARK:
            self.marks.append((subject, seq, record.ended))
        else:
            self._offer(subject)

    def passed(self, seq: int) -> None:
        """Note that the stream has delivered everything up to this number."""
        self.position = max(self.position, seq)

    def forget_mark(self, subject: str, seq: int) -> None:
        """Drop a mark, once no older message can arrive any more."""
        if self.mark_of(subject) == seq:
            del self._entries[subject]

    def vanished(self, subject: str) -> None:
        self._drop(subject)

    def begin_reading(self) -> None:
        self._reading += 1
        self._is_reading = True
        self.position = 0
        self.unread.clear()
        self.outdated.clear()

    def end_reading(self) -> None:
        """Drop the entries that this full reading did not see."""
        self._is_reading = False
        for subject, entry in list(self._entries.items()):
            if entry.reading != self._reading:
                self._drop(subject)

    def clear(self) -> None:
        """Drop everything, as the stream is a new one."""
        for subject in list(self._entries):
            self._drop(subject)
        self.unread.clear()
        self.outdated.clear()
        self.marks.clear()
        self.position = 0

    def release_claims(self, session: str) -> int:
        """Offer the claims of a dead session; return how many there were."""
        claimed = self._claimed.get(session, set())
        for subject in claimed:
            self._offer(subject)
        return len(claimed)

    # -- internals -------------------------------------------------------------------------------

    def _put(self, entry: IndexEntry) -> None:
        record, before = entry.record, self._entries.get(entry.subject)
        stays = before is not None and before.alive and before.record.number == record.number
        if before is not None and entry.alive and stays:
            self._unclaim(before)
        else:
            self._drop(entry.subject)
        self._entries[entry.subject] = entry
        if entry.gone:
            return
        if not entry.alive:
            self._dead[record.number] = entry.subject
            self.tally.add_dead(record.number, record.size_bytes, record.died_at_s)
            return
        self._alive[record.number] = entry.subject
        self.tally.add(
            *(record.number, record.function, record.lane.kind),
            *(record.size_bytes, record.queued_at_s),
        )
        if record.state is RecordState.CLAIMED:
            self._claimed[record.owner].add(entry.subject)

    def _drop(self, subject: str) -> None:
        entry = self._entries.pop(subject, None)
        if entry is None:
            return
        number = entry.record.number
        if entry.alive:
            self._unclaim(entry)
            self._alive.pop(number, None)
            self.tally.remove(number)
        elif self._dead.get(number) == subject:  # otherwise it was moved already
            del self._dead[number]
            self.tally.remove_dead(number)

    def _unclaim(self, entry: IndexEntry) -> None:
        owner = entry.record.owner
        if owner in self._claimed:
            self._claimed[owner].discard(entry.subject)
            if not self._claimed[owner]:
                del self._claimed[owner]

    def _offer(self, subject: str) -> None:
        entry = self._entries.get(subject)
        if entry is None or not entry.alive:
            return
        record = entry.record
        candidate = LaneCandidate(record.due_at_s, record.number, subject, entry.seq)
        if self._is_open(candidate):
            heappush(self._lanes.setdefault(record.lane, []), candidate)
            for notify in self.watchers:
                notify()

    def _first(self, lane: JobLane) -> LaneCandidate | None:
        waiting = self._lanes.get(lane)
        while waiting and not self._is_open(waiting[0]):
            heappop(waiting)
        if not waiting:
            self._lanes.pop(lane, None)
            return None
        return waiting[0]

    def _is_open(self, candidate: LaneCandidate) -> bool:
        entry = self._entries.get(candidate.subject)
        if entry is None or entry.seq != candidate.seq or not entry.alive:
            return False
        if candidate.subject in self._reserved:
            return False
        record = entry.record
        if record.state is RecordState.WAITING or record.owner == self._me:
            return True
        return not self._lives(record.owner)


def is_dead_subject(subject: str) -> bool:
    return subject.rsplit(".", 2)[-2] == "dead"
