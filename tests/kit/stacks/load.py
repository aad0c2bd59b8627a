"""Callers in threads that call until they are stopped, and keep every answer."""

import http.client
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import urlsplit

from gpufaas.errors import CommandError
from gpufaas.remote.scheduler_api import request_story
from tests.kit.stacks.stack import PATIENCE_S, Reached, Rest
from tests.kit.waiting import wait_until

_OK = 200
_LATE_S = PATIENCE_S + 30.0  # by then the gateway has said that a function is late
_JSON = {"Content-Type": "application/json"}


class Asked(NamedTuple):
    """One call again and again: of a function, or of a path below it."""

    name: str
    body: bytes = b""
    pause_s: float = 0.01


class Failure(NamedTuple):
    """A call that did not succeed: when it was under way, and what was answered (0: nothing)."""

    name: str
    began_s: float
    ended_s: float
    status: int
    said: str


@dataclass
class Load:
    """What came of all the calls."""

    succeeded: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    slowest_s: float = 0.0
    stopping: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def took(self, name: str, began_s: float, status: int, said: str) -> None:
        now_s = time.monotonic()
        with self._lock:
            self.slowest_s = max(self.slowest_s, now_s - began_s)
            if status == _OK:
                self.succeeded[name] += 1
            else:
                self.failures.append(Failure(name, began_s, now_s, status, said))

    def some_more(self, count: int = 20) -> None:
        """Wait until so many more calls of each kind have succeeded."""
        before = Counter(self.succeeded)
        wait_until(
            lambda: all(self.succeeded[name] >= before[name] + count for name in list(before)),
            f"{count} more calls of each kind than {before}",
            instead=lambda: f"but {self.succeeded}, with {counted(self.failures)}",
        )


@contextmanager
def load(url: str, asked: Sequence[Asked], *, each: int = 1) -> Iterator[Load]:
    """Have `each` callers for everything that is asked; all of them have ended afterwards."""
    found = Load()
    # A kind is known from the start, so that waiting for more of it means something.
    found.succeeded.update({one.name: 0 for one in asked})
    where = urlsplit(url).netloc
    threads = [
        threading.Thread(target=_call, args=(where, one, found))
        for one in asked
        for _ in range(each)
    ]
    for thread in threads:
        thread.start()
    try:
        yield found
    finally:
        found.stopping.set()
        for thread in threads:
            thread.join()


def _call(where: str, asked: Asked, found: Load) -> None:
    connection = http.client.HTTPConnection(where, timeout=_LATE_S)
    try:
        while not found.stopping.is_set():
            began_s = time.monotonic()
            status, said = _once(connection, asked)
            found.took(asked.name, began_s, status, said)
            time.sleep(asked.pause_s)
    finally:
        connection.close()


def _once(connection: http.client.HTTPConnection, asked: Asked) -> tuple[int, str]:
    try:
        connection.request("POST", f"/function/{asked.name}", asked.body, _JSON)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        connection.close()
        return 0, repr(error)


def warm(up: Reached, rest: Rest, asked: Asked) -> None:
    """Call a function until the gateway asks for its GPU: its models are traced and known then."""

    def placed() -> bool:
        call_id = uuid.uuid4().hex
        said = {**_JSON, "X-Call-Id": call_id}
        answer = rest.call(asked.name, asked.body, headers=said)
        assert answer.status_code == _OK, answer.text
        try:
            return bool(request_story(up.scheduler, call_id))
        except CommandError:
            return False  # it asked for no GPU

    wait_until(placed, f"a GPU is asked for {asked.name}")


def counted(failures: Sequence[Failure]) -> Mapping[str, int]:
    """For messages: how many of each kind."""
    return Counter(f"{one.name}: {one.status} {one.said[:120]}" for one in failures)
