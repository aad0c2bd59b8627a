"""What GPU managers' own logs say of leases and loads, and what may never be in them."""

import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

_AT = r"(?P<date>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(?P<milli>\d{3}) "
_LINE = re.compile(
    _AT + r"(?:DEBUG|INFO) gpu_manager[.\w]*: (?:"
    r"lease (?P<granted>\d+) on (?P<given>\S+) is granted to (?P<requests>.*)|"
    r"lease (?P<ended>\d+) on (?P<freed>\S+) has ended: (?P<why>.*)|"
    r"(?P<model>\S+) was loaded on (?P<gpu>\S+) in .*)"
)


class Granted(NamedTuple):
    """A lease was put in force."""

    at_s: float
    lease: int
    slot: str
    requests: tuple[str, ...]


class Ended(NamedTuple):
    """A lease was over: no call of it runs any more."""

    at_s: float
    lease: int
    slot: str
    why: str


class Loaded(NamedTuple):
    """A model came onto a GPU."""

    at_s: float
    model: str
    gpu: str


Entry = Granted | Ended | Loaded


def entries(log: str) -> list[Entry]:
    """The journal of one life of a GPU manager, in the order in which it came about."""
    return [_entry(found) for line in log.splitlines() if (found := _LINE.match(line))]


def unended(log: str) -> str:
    """The lines of the leases that one life of a GPU manager has granted, and that go on."""
    granted = {}
    for line in log.splitlines(keepends=True):
        for entry in entries(line):
            if isinstance(entry, Granted):
                granted[entry.lease] = line
            elif isinstance(entry, Ended):
                granted.pop(entry.lease, None)
    return "".join(granted.values())


def _entry(found: re.Match[str]) -> Entry:
    moment = time.mktime(time.strptime(found["date"], "%Y-%m-%d %H:%M:%S"))
    at_s = moment + int(found["milli"]) / 1000
    if found["granted"]:
        requests = tuple(found["requests"].split(", ")) if found["requests"] else ()
        return Granted(at_s, int(found["granted"]), found["given"], requests)
    if found["ended"]:
        return Ended(at_s, int(found["ended"]), found["freed"], found["why"])
    return Loaded(at_s, found["model"], found["gpu"])


@dataclass
class Journal:
    """The leases of every node, and what is wrong with them.

    `resident` are the models that came onto each GPU in the latest life of its manager, `came_back`
    says of those that came more than once.
    """

    granted: dict[int, Granted] = field(default_factory=dict)
    ended: dict[int, Ended] = field(default_factory=dict)
    resident: set[tuple[str, str]] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)
    came_back: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, logs: Iterable[str]) -> "Journal":
        """What GPU managers say, each from its start to its end."""
        found = cls()
        for log in logs:
            found._take(entries(log))
        return found

    @property
    def in_force(self) -> list[Granted]:
        """Leases that have not ended."""
        return [granted for lease, granted in self.granted.items() if lease not in self.ended]

    def leases_of(self) -> Mapping[str, list[int]]:
        """Every request's leases."""
        found = defaultdict(list)
        for granted in self.granted.values():
            for request in granted.requests:
                found[request].append(granted.lease)
        return found

    def _take(self, found: Iterable[Entry]) -> None:
        holders: dict[str, int] = {}
        loads: Counter[tuple[str, str]] = Counter()
        for entry in found:
            if isinstance(entry, Granted):
                if entry.slot in holders:
                    self.wrong.append(f"{entry} while {holders[entry.slot]} was in force")
                if entry.lease in self.granted:
                    self.wrong.append(f"{entry} a second time")
                self.granted[entry.lease] = entry
                holders[entry.slot] = entry.lease
            elif isinstance(entry, Ended):
                if holders.pop(entry.slot, None) != entry.lease:
                    self.wrong.append(f"{entry} was not in force")
                self.ended[entry.lease] = entry
            else:
                loads[entry.model, entry.gpu] += 1
        self.came_back += [
            f"{model} left {gpu} and came back" for model, gpu in loads if loads[model, gpu] > 1
        ]
        gpus = {gpu for _, gpu in loads}
        self.resident = {each for each in self.resident if each[1] not in gpus} | loads.keys()
