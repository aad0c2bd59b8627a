"""Which gateways live: each says so again and again, and what the dead had claimed is free."""

import fcntl
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from gateway_ext.errors import QueueFailed

_FORGET_S = 24 * 3600.0


@dataclass(slots=True)
class _Gateway:
    seq: int
    session: str
    heard_s: float
    written_s: float  # by the clock of the servers


class Presence:
    """Sessions of gateways; `now_s` is a clock that only goes forward.

    A session is dead once it closed, once its gateway has a later one, or when it has said nothing
    for `lease_s` while we were listening.
    """

    def __init__(self, lease_s: float, now_s: Callable[[], float]) -> None:
        self._lease_s = lease_s
        self._now_s = now_s
        self._gateways: dict[str, _Gateway] = {}
        self._servers_s = 0.0
        self._lost: set[str] = set()

    def lives(self, session: str) -> bool:
        """Whether it may still work on what it claimed."""
        known = self._gateways.get(gateway_of(session))
        if known is None or known.session != session:
            return False
        return self._now_s() - known.heard_s <= self._lease_s

    def heard(self, gateway: str, seq: int, content: bytes, written_s: float) -> None:
        """A gateway said which session it has now; none where it closed."""
        session = str(json.loads(content)["session"])
        self._gateways[gateway] = _Gateway(seq, session, self._now_s(), written_s)
        self._servers_s = max(self._servers_s, written_s)
        self._lost.discard(session)

    def session_of(self, gateway: str) -> str:
        """The session that a gateway has now; "" where it has none."""
        known = self._gateways.get(gateway)
        return known.session if known is not None else ""

    def listening_again(self) -> None:
        """We did not hear for a while: nobody is dead because of that."""
        for known in self._gateways.values():
            known.heard_s = self._now_s()

    def newly_dead(self, sessions: list[str]) -> list[str]:
        """Those of these that are dead, and were not when this was asked before."""
        found = [one for one in sessions if one not in self._lost and not self.lives(one)]
        self._lost |= set(found)
        self._lost &= set(sessions)
        return found

    def old(self) -> list[tuple[str, int]]:
        """What the stream has of gateways that are long gone: their names, and the messages."""
        before_s = self._servers_s - _FORGET_S
        return [(name, one.seq) for name, one in self._gateways.items() if one.written_s < before_s]

    def forget(self, gateway: str) -> None:
        """It is not in the stream any more."""
        self._gateways.pop(gateway, None)


class Identity:
    """Who this gateway is, over its restarts: a name in its state folder, which it alone has.

    `session` is another one each time: what the one before had claimed is free at once.
    """

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o700)
            self._file = os.open(folder / "gateway", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise QueueFailed(f"the job queue has no folder: {error}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.gateway = os.pread(self._file, 64, 0).decode("ascii")
            if not self.gateway.isalnum():
                self.gateway = uuid4().hex
                os.pwrite(self._file, self.gateway.encode(), 0)
        except (OSError, ValueError) as error:
            os.close(self._file)
            raise QueueFailed(f"another gateway has the folder {folder}: {error}") from error
        self.session = f"{self.gateway}.{uuid4().hex[:12]}"

    def close(self) -> None:
        """Let another process be this gateway."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def beat(session: str) -> bytes:
    """What a gateway says while it lives; with an empty session it says that it closes."""
    return json.dumps({"session": session}).encode()


def gateway_of(session: str) -> str:
    """Whose session it is."""
    return session.partition(".")[0]
