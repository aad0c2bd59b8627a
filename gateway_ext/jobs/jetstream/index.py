"""What the stream of records says now, kept up to date in memory: jobs, dead letters; pure.

Every gateway has one. It is told of each message that the stream delivers and of each that this
gateway wrote; what is older than what it knows changes nothing. A claim is decided by the stream
alone, which takes a write only where nobody wrote in between: an index that lags behind costs a
write that is refused, and nothing else.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from gateway_ext.jobs.jetstream.lanes import Candidate, Lanes
from gateway_ext.jobs.jetstream.records import Record, State
from gateway_ext.jobs.model import Head, JobNumber, Kind, Lane
from gateway_ext.jobs.tally import Tally

_ALIVE = frozenset({State.WAITING, State.CLAIMED})


@dataclass(slots=True)
class Entry:
    """What stands at a subject: the message's number, the record, the look that saw it last."""

    subject: str
    seq: int
    record: Record
    look: int = 0

    @property
    def alive(self) -> bool:
        """Whether its job waits or is claimed."""
        return self.record.state in _ALIVE


class Index:
    """`me` is our session; `lives` says of another one whether it still has what it claimed."""

    def __init__(self, tally: Tally, me: str, lives: Callable[[str], bool]) -> None:
        self.tally = tally
        self.position = 0
        self.offered: list[Callable[[], None]] = []
        # Marks that came since somebody last took them: subject, number, who left it.
        self.marks: list[tuple[str, int, str]] = []
        # Subjects where something stands that we cannot read: a later gateway's, say.
        self.unread: set[str] = set()
        self._me = me
        self._lives = lives
        self._entries: dict[str, Entry] = {}
        self._alive: dict[JobNumber, str] = {}
        self._dead: dict[JobNumber, str] = {}
        self._claimed: defaultdict[str, set[str]] = defaultdict(set)
        self._held: set[str] = set()
        self._gone: dict[str, tuple[int, int]] = {}  # the mark's number, the look that saw it
        self._lanes = Lanes(self._is_open)
        self._look = 0

    # -- what is asked ---------------------------------------------------------------------------

    def heads(self, kind: Kind) -> list[Head]:
        """The lanes in which something waits that may be claimed."""
        return self._lanes.heads(kind)

    def take(self, lane: Lane, now_s: float) -> Entry | None:
        """The first due job of a lane, to be claimed by us: nobody here is given it again."""
        found = self._lanes.take(lane, now_s)
        if found is None:
            return None
        self._held.add(found.subject)
        return self._entries[found.subject]

    def let_go(self, subject: str) -> None:
        """We do not work on it any more; where it may be claimed it is offered again."""
        self._held.discard(subject)
        self._offer(subject)

    def alive(self, subject: str) -> Entry | None:
        """A job that waits or is claimed."""
        entry = self._entries.get(subject)
        return entry if entry is not None and entry.alive else None

    def is_alive(self, number: JobNumber) -> bool:
        """Whether this one waits or is claimed."""
        return number in self._alive

    def dead(self, number: JobNumber) -> Entry | None:
        """A dead letter."""
        subject = self._dead.get(number)
        return None if subject is None else self._entries[subject]

    def dead_after(self, after: int, limit: int) -> list[Record]:
        """Dead letters, lowest number first."""
        numbers = sorted(number for number in self._dead if number > after)
        return [self._entries[self._dead[number]].record for number in numbers[:limit]]

    def mark_of(self, subject: str) -> int:
        """The number of the mark that a job left there; 0 where none is known."""
        return self._gone.get(subject, (0, 0))[0]

    def seq_of(self, subject: str) -> int:
        """The number of the message that is known there, a mark's too."""
        entry = self._entries.get(subject)
        return entry.seq if entry is not None else self.mark_of(subject)

    def uids(self) -> set[str]:
        """Whose parts are needed."""
        return {entry.record.uid for entry in self._entries.values()}

    def halves(self) -> list[Entry]:
        """Letters left half done by somebody who died: not moved, or replayed and still here."""
        found = []
        for number, subject in self._dead.items():
            entry = self._entries[subject]
            if number in self._alive or not is_dead_subject(subject):
                found.append(entry)
        return found

    def letters(self) -> list[Entry]:
        """All dead letters."""
        return [self._entries[subject] for subject in self._dead.values()]

    def claimers(self) -> list[str]:
        """The sessions that have claims."""
        return list(self._claimed)

    # -- what is told ----------------------------------------------------------------------------

    def apply(self, subject: str, seq: int, record: Record) -> None:
        """A message stands in the stream."""
        known = self.seq_of(subject)
        # What a look finds is true: servers that lost their power may have lost what we know.
        if seq < known and not self._is_unseen(subject):
            return
        if seq == known and not self._is_other(subject, record):
            self._see(subject)
            return
        if record.state is State.GONE:
            self._drop(subject)
            self._gone[subject] = (seq, self._look)
            self.marks.append((subject, seq, record.ended))
            return
        self._gone.pop(subject, None)
        self._put(Entry(subject, seq, record, self._look))
        self._offer(subject)

    def passed(self, seq: int) -> None:
        """The stream has delivered everything up to here."""
        self.position = max(self.position, seq)

    def forget_mark(self, subject: str, seq: int) -> None:
        """Nothing older is on its way to us."""
        if self.mark_of(subject) == seq:
            self._gone.pop(subject, None)

    def vanished(self, subject: str) -> None:
        """Nothing stands there any more, not even a mark."""
        self._drop(subject)
        self._gone.pop(subject, None)

    def begin_look(self) -> None:
        """The stream is read from its beginning."""
        self._look += 1
        self.position = 0
        self.unread.clear()

    def end_look(self) -> None:
        """It was: what was not seen is not there."""
        for subject, entry in list(self._entries.items()):
            if entry.look != self._look:
                self._drop(subject)
        self._gone = {
            subject: mark for subject, mark in self._gone.items() if mark[1] == self._look
        }

    def clear(self) -> None:
        """The stream is another one."""
        for subject in list(self._entries):
            self._drop(subject)
        self._gone.clear()
        self.unread.clear()
        self.marks.clear()
        self.position = 0

    def lost(self, session: str) -> int:
        """A session is dead: what it had claimed is offered; how much that is."""
        claimed = self._claimed.get(session, set())
        for subject in claimed:
            self._offer(subject)
        return len(claimed)

    # -- how it is kept --------------------------------------------------------------------------

    def _is_unseen(self, subject: str) -> bool:
        """Whether what is known there was not seen in this look at the stream."""
        entry = self._entries.get(subject)
        look = entry.look if entry is not None else self._gone.get(subject, (0, self._look))[1]
        return look != self._look

    def _is_other(self, subject: str, record: Record) -> bool:
        """Whether a look found another record by the number of the one that is known."""
        if not self._is_unseen(subject):
            return False
        entry = self._entries.get(subject)
        return entry.record != record if entry is not None else record.state is not State.GONE

    def _see(self, subject: str) -> None:
        entry = self._entries.get(subject)
        if entry is not None:
            entry.look = self._look
        elif subject in self._gone:
            self._gone[subject] = (self._gone[subject][0], self._look)

    def _put(self, entry: Entry) -> None:
        record, before = entry.record, self._entries.get(entry.subject)
        stays = before is not None and before.alive and before.record.number == record.number
        if before is not None and entry.alive and stays:
            self._unclaim(before)
        else:
            self._drop(entry.subject)
        self._entries[entry.subject] = entry
        if not entry.alive:
            self._dead[record.number] = entry.subject
            self.tally.bury(record.number, record.size_bytes, record.died_at_s)
            return
        self._alive[record.number] = entry.subject
        self.tally.keep(
            *(record.number, record.function, record.kind),
            *(record.size_bytes, record.queued_at_s),
        )
        if record.state is State.CLAIMED:
            self._claimed[record.owner].add(entry.subject)

    def _drop(self, subject: str) -> None:
        entry = self._entries.pop(subject, None)
        if entry is None:
            return
        number = entry.record.number
        if entry.alive:
            self._unclaim(entry)
            self._alive.pop(number, None)
            self.tally.drop(number)
        elif self._dead.get(number) == subject:  # else it stands elsewhere already
            del self._dead[number]
            self.tally.unearth(number)

    def _unclaim(self, entry: Entry) -> None:
        owner = entry.record.owner
        if owner in self._claimed:
            self._claimed[owner].discard(entry.subject)
            if not self._claimed[owner]:
                del self._claimed[owner]

    def _offer(self, subject: str) -> None:
        """Put it in its lane, if it may be claimed."""
        entry = self._entries.get(subject)
        if entry is None or not entry.alive:
            return
        record = entry.record
        candidate = Candidate(record.due_at_s, record.number, subject, entry.seq)
        if self._is_open(candidate):
            self._lanes.add(record.in_lane, candidate)
            for told in self.offered:
                told()

    def _is_open(self, candidate: Candidate) -> bool:
        entry = self._entries.get(candidate.subject)
        if entry is None or entry.seq != candidate.seq or not entry.alive:
            return False
        if candidate.subject in self._held:
            return False
        record = entry.record
        if record.state is State.WAITING or record.owner == self._me:
            return True
        return not self._lives(record.owner)


def is_dead_subject(subject: str) -> bool:
    """Whether dead letters stand there."""
    return subject.rsplit(".", 2)[-2] == "dead"
