"""The folder of a stack: its secret, data, logs and sockets, and who runs it."""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from gpufaas.credentials import state_folder
from gpufaas.errors import AlreadyUp, CommandError

_LONGEST_SOCKET = 100  # the kernel takes 107 bytes
# Functions run as other users: they may pass through to what is theirs, and list nothing.
_PASSABLE = 0o711


@dataclass(frozen=True, slots=True)
class Running:
    """A stack that is up: the process that supervises it, and where its parts answer."""

    pid: int
    gateway: str
    scheduler: str
    node: str


@dataclass(frozen=True, slots=True)
class StackFolder:
    """Where a stack keeps what is its own."""

    root: Path

    @property
    def secret_file(self) -> Path:
        """What all parts share."""
        return self.root / "secret"

    @property
    def etcd(self) -> Path:
        """The datastore's data."""
        return self.root / "etcd"

    @property
    def gateway(self) -> Path:
        """Functions, builds, environments, jobs."""
        return self.root / "gateway"

    @property
    def credentials(self) -> Path:
        """The gateway's user and password, as OpenFaaS keeps them."""
        return self.root / "secrets"

    @property
    def node_address(self) -> str:
        """Where functions find the GPU manager."""
        path = self._node / "node.sock"
        if len(os.fsencode(path)) <= _LONGEST_SOCKET:
            return f"unix:{path}"
        return f"unix:@gpufaas-{hashlib.sha256(os.fsencode(path)).hexdigest()[:16]}"

    def log(self, part: str) -> Path:
        """What one of the parts wrote."""
        return self.root / "logs" / f"{part}.log"

    def make(self) -> None:
        """Have it there."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self.root.chmod(_PASSABLE)
            (self.root / "logs").mkdir(mode=0o700, exist_ok=True)
            self._node.mkdir(exist_ok=True)
            self._node.chmod(_PASSABLE)
        except OSError as error:
            raise CommandError(f"{self.root}: {error.strerror}") from error

    @contextmanager
    def held(self) -> Iterator[None]:
        """Be the one who runs it; AlreadyUp where another process does."""
        with self._lock_file() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                found = self._recorded()
                who = "just started" if found is None else f"process {found.pid}"
                raise AlreadyUp(str(self.root), who) from error
            try:
                yield
            finally:
                self._record.unlink(missing_ok=True)

    def says(self, running: Running) -> None:
        """Let others know; only for the one who holds it."""
        aside = self._record.with_suffix(".new")
        aside.write_text(json.dumps(asdict(running)))
        aside.replace(self._record)

    def running(self) -> Running | None:
        """The stack that is up here, if one is."""
        with suppress(FileNotFoundError), self._lock_file(os.O_RDONLY) as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return self._recorded()
        return None

    @property
    def _node(self) -> Path:
        """The socket's alone: functions in containers see all of its folder."""
        return self.root / "node"

    @property
    def _record(self) -> Path:
        return self.root / "stack.json"

    @contextmanager
    def _lock_file(self, flags: int = os.O_RDWR | os.O_CREAT) -> Iterator[int]:
        descriptor = os.open(self.root / "lock", flags | os.O_CLOEXEC, 0o600)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _recorded(self) -> Running | None:
        """What its holder says; None in the moment before it says anything."""
        try:
            return Running(**json.loads(self._record.read_text()))
        except (OSError, ValueError, TypeError):
            return None


def stack_folder(named: str | None, environment: Mapping[str, str]) -> StackFolder:
    """The folder that was named, or this user's."""
    return StackFolder(Path(named).absolute() if named else state_folder(environment))
