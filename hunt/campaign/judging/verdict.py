"""What must hold of all calls of a round, whatever was broken: each ended exactly once."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hunt.campaign.judging.call_journal import Ending, Kind, WatchedCall

_REFUSED = {Ending.STATED, Ending.UNREACHABLE}
_ONCE = (Kind.SYNC, Kind.STREAM, Kind.PLAIN)  # nobody said that these may be made again
_ONCE_NAMES = tuple(f"{kind}-" for kind in _ONCE)  # how the ids of their calls begin
_GOOD = 200


@dataclass(frozen=True, slots=True)
class Excuse:
    """Calls of these kinds may break off if they were under way within this time.

    Whoever holds a caller's connection can state no error once he is dead.
    """

    kinds: frozenset[Kind]
    from_s: float
    until_s: float

    def covers(self, call: WatchedCall) -> bool:
        """Whether this call may have broken off."""
        ended_s = self.until_s if call.ended_s is None else call.ended_s
        within = call.began_s <= self.until_s and ended_s >= self.from_s
        return call.kind in self.kinds and within


def violations(
    calls: Iterable[WatchedCall], executed: Mapping[str, int], excuse: Excuse
) -> list[str]:
    """What is wrong with these calls; `executed` says how often a function began each of them.

    It may name calls of earlier rounds too: those that a function has begun since then.
    """
    found, known = [], set()
    for call in calls:
        known.add(call.id)
        found += [f"{wrong}: {call}" for wrong in _wrong(call, excuse)]
        times = executed.get(call.id, 0)
        if call.kind in _ONCE and times > 1:
            found.append(f"doubled, executed {times} times: {call}")
        if call.served_s is not None and times == 0:
            found.append(f"answered although no function executed it: {call}")
    for past in executed.keys() - known:
        if past.startswith(_ONCE_NAMES) and executed[past] > 1:
            found.append(f"doubled, executed {executed[past]} times: {past}, of an earlier round")
    return found


def counts(calls: Iterable[WatchedCall]) -> Mapping[str, int]:
    """How many calls of each kind ended how, for the record of a round."""
    return dict(Counter(f"{call.kind} {call.ending}" for call in calls))


def _wrong(call: WatchedCall, excuse: Excuse) -> list[str]:
    if call.ending is None:
        return ["lost, neither answered nor refused"]
    if call.ending is Ending.LATE:
        return ["lost, nothing came within the caller's patience"]
    if call.ending is Ending.WRONG:
        return ["answered wrongly"]
    if call.ending is Ending.BROKEN and not excuse.covers(call):
        return ["broken off without a stated error"]
    if call.kind is Kind.ASYNC:
        return _wrong_callbacks(call)
    return ["called back, although it is no async call"] if call.callbacks else []


def _wrong_callbacks(call: WatchedCall) -> list[str]:
    found = []
    if call.accepted and not call.callbacks:
        found.append("lost, accepted and never called back")
    if call.ending in _REFUSED and call.callbacks:
        found.append("made, although it was refused")
    for seen in call.callbacks:
        if seen.status != _GOOD:
            found.append(f"given up with status {seen.status}")
        elif not seen.right:
            found.append("called back with a wrong result")
    return found
