"""`gpufaas up` on this machine, with small disks, a clock and a memory limit of its own."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

from gpufaas.errors import CommandError
from hunt.campaign.campaign_functions import deploy
from hunt.campaign.judging.leftovers import Holdings
from hunt.campaign.worlds.books import NodeMetrics, books, leases, waiting
from hunt.campaign.worlds.memory_limit import MemoryGroup
from hunt.campaign.worlds.new_text import NewText
from hunt.campaign.worlds.process_holdings import (
    marked,
    memfds,
    part_holdings,
    role,
    roles,
    strays,
    zombies,
)
from hunt.campaign.worlds.shifted_clock import ShiftedClock
from hunt.campaign.worlds.small_disk import SmallDisk
from hunt.campaign.worlds.world import wait_seldom
from tests.kit.stacks.stack import Stack
from tests.kit.waiting import wait_until

PARTS = {"gateway", "scheduler", "gpu-manager", "etcd"}
_QUEUE_MIB, _ETCD_MIB, _SPILL_MIB = 64, 256, 128
# Both models are 40 MiB: host memory has room for one of them, the other one's weights are spilled.
_OPTIONS = (
    *("--store-memory", "64MiB", "--emulate-load", "0.1", "--emulate-run", "0.02"),
    *("--gpu-memory", "512MiB"),
)


class UpWorld:
    """A stack that supervises itself: nothing of it is started again from outside.

    What it writes and uses is small, and can be broken.
    """

    name = "up"
    host = "127.0.0.1"

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.clock = ShiftedClock(folder / "clock")
        self.stack = Stack(folder, {**environment, **self.clock.environment})
        self.work = self.stack.work
        state = self.stack.state
        state.mkdir(mode=0o711)
        (state / "gateway").mkdir(mode=0o711)
        self.disks = {
            "queue": SmallDisk(state / "gateway" / "jobs", _QUEUE_MIB),
            "etcd": SmallDisk(state / "etcd", _ETCD_MIB, mode=0o700),
            "spill": SmallDisk(folder / "spill", _SPILL_MIB, mode=0o700),
        }
        self.memory = MemoryGroup(f"campaign-{os.getpid()}")
        self._read = NewText()

    @property
    def url(self) -> str:
        """Where its gateway answers."""
        return self.stack.url

    def start(self) -> None:
        """Have it up, with its functions."""
        spill = ("--spill", str(self.disks["spill"].folder))
        launched = self.stack.launch(*_OPTIONS, *spill)
        self.memory.add(launched.pid)
        wait_until(lambda: self.stack.is_up() or launched.poll() is not None, "up")
        assert launched.poll() is None, self.stack.said()
        deploy(self.stack, self.work)

    def end(self) -> None:
        """Whatever happened, nothing of it stays."""
        with contextlib.ExitStack() as ends:
            for disk in self.disks.values():
                ends.callback(disk.end)
            ends.callback(self.memory.end)
            ends.callback(self.stack.end)

    def inside(self) -> AbstractContextManager[None]:
        """It is on this machine's own network."""
        return nullcontext()

    def restore(self) -> None:
        """Wait until the stack has restored itself."""
        wait_seldom(self._runs, "all parts run")
        wait_seldom(self._is_whole, "its node is led, with etcd's word for it")

    def holdings(self) -> Holdings:
        """What it holds now; CommandError or OSError where a part does not answer."""
        cluster = self.stack.scheduler.get("/cluster")
        processes = self.processes()
        (manager,) = (said for said in processes.values() if role(said) == "gpu-manager")
        node = NodeMetrics(f"http://{manager.partition('--metrics ')[2].partition(' ')[0]}")
        roots = [pid for pid, command in processes.items() if role(command) == "up"]
        found_books = books(cluster, [node])
        return Holdings(
            parts={
                name: part_holdings(pid)
                for pid, command in processes.items()
                if (name := role(command)) in PARTS
            },
            processes=roles(processes),
            strays=strays(processes, roots),
            zombies=zombies(processes),
            memfds=memfds(processes),
            models=sum(one.hosted for one in found_books.values()),
            leases=leases(cluster),
            waiting=waiting(cluster),
            node_leases=node.leases(),
            books=found_books,
        )

    def processes(self) -> Mapping[int, str]:
        """Every process of it, with its command."""
        return marked([f"{self.stack.folder}/".encode()])

    def pids(self, part: str) -> list[int]:
        """The processes of one of its parts."""
        return [pid for pid, command in self.processes().items() if role(command) == part]

    def logs(self) -> Sequence[Path]:
        """What its parts have written."""
        etcd = self.stack.state / "etcd" / "etcd.log"
        return [self.stack.output, *sorted((self.stack.state / "logs").glob("*.log")), etcd]

    def wrong(self) -> list[str]:
        """An exception that nobody expected is wrong, whatever was broken."""
        return self._read.tracebacks(self.logs())

    def _runs(self) -> bool:
        return roles(self.processes()).keys() >= PARTS

    def _is_whole(self) -> bool:
        with suppress(CommandError, OSError):
            # A wiped etcd runs twice: to learn its user, and then for the scheduler.
            confirmed = bool(self.stack.scheduler.get("/readyz")["confirmed"])
            gpus = self.stack.scheduler.get("/cluster")["gpus"]
            return confirmed and bool(gpus) and not any(gpu["silent"] for gpu in gpus)
        return False


@contextmanager
def up_world(environment: Mapping[str, str]) -> Iterator[UpWorld]:
    """One that is up; the path of its folder is short, as sockets lie in it."""
    folder = Path(tempfile.mkdtemp(prefix="camp"))
    folder.chmod(0o755)
    found = UpWorld(folder, environment)
    try:
        found.start()
        yield found
    finally:
        with contextlib.ExitStack() as ends:
            ends.callback(shutil.rmtree, folder, ignore_errors=True)
            ends.callback(found.end)
