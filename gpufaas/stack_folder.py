"""The folder of a stack: its secret, data, logs and sockets, and the process that runs it."""

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from gpufaas.errors import AlreadyUp, CommandError

# The line of `--help` that says whom a command asks.
WHICH_STACK = (
    "It asks the server that is named, else the stack in GPUFAAS_STATE, else the one in the "
    "default folder."
)
_LONGEST_SOCKET = 100  # the kernel takes 107 bytes
# Functions run as other users: they may reach their files in the folder, and list nothing.
_PASSABLE = 0o711
_LOOKS, _LOOK_S = 50, 0.02


@dataclass(frozen=True, slots=True)
class RunningStack:
    """A stack: its supervisor's process, and the addresses of its parts once it is up."""

    pid: int
    gateway: str = ""
    scheduler: str = ""
    node: str = ""


@dataclass(frozen=True, slots=True)
class StackFolder:
    """The paths within a stack's folder."""

    root: Path

    @property
    def secret_file(self) -> Path:
        """The secret that all parts share."""
        return self.root / "secret"

    @property
    def etcd(self) -> Path:
        return self.root / "etcd"

    @property
    def gateway(self) -> Path:
        """The gateway's functions, builds, environments and jobs."""
        return self.root / "gateway"

    @property
    def credentials(self) -> Path:
        """The gateway's user and password, in files named as OpenFaaS's."""
        return self.root / "secrets"

    @property
    def node_address(self) -> str:
        """The GPU manager's address for functions."""
        path = self._node / "node.sock"
        if len(os.fsencode(path)) <= _LONGEST_SOCKET:
            return f"unix:{path}"
        return f"unix:@gpufaas-{hashlib.sha256(os.fsencode(path)).hexdigest()[:16]}"

    def log(self, part: str) -> Path:
        return self.root / "logs" / f"{part}.log"

    def kept_port(self, part: str) -> Path:
        """The file of the port that a part has while its usual one is another program's."""
        return self.root / f"{part}.port"

    def make(self) -> None:
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
        """Hold the folder's lock; AlreadyUp if another process holds it."""
        with self._lock_file() as lock:
            if not _locked(lock):
                running = self._recorded()
                holder = "just started" if running is None else f"process {running.pid}"
                raise AlreadyUp(str(self.root), holder)
            self._record_file.unlink(missing_ok=True)  # a killed holder has left its own
            try:
                self.record(RunningStack(os.getpid()))
                yield
            finally:
                self._record_file.unlink(missing_ok=True)

    def record(self, running: RunningStack) -> None:
        """Publish the stack for other commands; only for the holder of the lock."""
        aside = self._record_file.with_suffix(".new")
        try:
            aside.write_text(json.dumps(asdict(running)))
            aside.replace(self._record_file)
        except OSError as error:
            raise CommandError(f"{self._record_file}: {error.strerror}") from error

    def holder(self) -> RunningStack | None:
        """The stack that is up or starts in this folder, or None."""
        with suppress(FileNotFoundError), self._lock_file(os.O_RDONLY) as lock:
            for _ in _looks():
                try:
                    fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    if holder := self._recorded():
                        return holder
                else:
                    return None
        return None

    def running(self) -> RunningStack | None:
        """The stack that is up in this folder, or None."""
        holder = self.holder()
        return holder if holder and holder.gateway else None

    def up(self, flag: str) -> RunningStack:
        """The stack that is up in this folder; CommandError names the folder if none is.

        `flag` is the option that names another server.
        """
        running = self.holder()
        if running is None:
            raise CommandError(
                f"nothing is up in {self.root}: `gpufaas up` starts a stack, GPUFAAS_STATE=DIR "
                f"names another stack's folder, {flag} another server"
            )
        if not running.gateway:
            raise CommandError(
                f"a stack is starting in {self.root} (process {running.pid}): try again in some "
                "seconds"
            )
        return running

    @property
    def _node(self) -> Path:
        """A folder for the socket alone: functions in containers see all of it."""
        return self.root / "node"

    @property
    def _record_file(self) -> Path:
        return self.root / "stack.json"

    @contextmanager
    def _lock_file(self, flags: int = os.O_RDWR | os.O_CREAT) -> Iterator[int]:
        lock = self.root / "lock"
        try:
            descriptor = os.open(lock, flags | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            raise
        except OSError as error:  # another user's, or the folder is none
            raise CommandError(f"{lock}: {error.strerror}") from error
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _recorded(self) -> RunningStack | None:
        """The record of the lock's holder; None before the holder has written it."""
        try:
            return RunningStack(**json.loads(self._record_file.read_text()))
        except (OSError, ValueError, TypeError):
            return None


def _looks() -> Iterator[None]:
    """Looks for what lasts a moment: counted, since much time may pass while a process is still."""
    for look in range(_LOOKS):
        if look:
            time.sleep(_LOOK_S)
        yield


def _locked(lock: int) -> bool:
    """Take the lock for this process alone; whoever asks for the holder has it for a moment."""
    for _ in _looks():
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    return False


def stack_folder(named: str | None, environment: Mapping[str, str]) -> StackFolder:
    """The named folder, or this user's default."""
    return StackFolder(Path(named).absolute() if named else state_folder(environment))


def state_folder(environment: Mapping[str, str]) -> Path:
    """This user's folder for everything that outlives a process."""
    named = environment.get("GPUFAAS_STATE")
    if named:
        return Path(named).absolute()
    if os.geteuid() == 0:
        return Path("/var/lib/gpufaas")
    state = environment.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "gpufaas"
