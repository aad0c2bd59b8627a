"""Functions that put data and get it as a test says, and a node that tests use in turn."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.kit.processes.daemons import Daemon
from tests.kit.processes.two_nodes import Program, TwoNodes
from tests.kit.waiting import wait_until

# Evaluates each line that it hears; what it says is JSON.
_FUNCTION = """
import json, sys, torch
from torch_shim.data.put_and_get import drop, get, put, settle
from torch_shim.process_report import report
torch.set_grad_enabled(False)

class Scale(torch.nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((256,), scale))

    def forward(self, x):
        return x * self.weight

class Grow(Scale):
    def forward(self, x):
        x.add_(1)
        return (x * self.weight).sum()

there = torch.arange(256 * 1024.0).view(-1, 256)
double = Scale(2.0).cuda()
triple = Scale(3.0).cuda()
grow = Grow(1.0).cuda()
kept = {}

def bytes_moved():
    return report.counts.bytes_in + report.counts.bytes_out

for line in sys.stdin:
    try:
        exec(line)
        said = kept.pop("say", None)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    print(json.dumps(said), flush=True)
"""


class DataFunction:
    """A function of a namespace, which does what a test says."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._put: list[str] = []

    def do(self, *lines: str) -> None:
        """Run lines; none of them fails."""
        for line in lines:
            assert json.loads(self._program.ask(line)) is None, line

    def say(self, expression: str) -> object:
        """What an expression is, or the error that it raises."""
        found: object = json.loads(self._program.ask(f"kept['say'] = {expression}"))
        return found

    def put(self, expression: str) -> str:
        handle = self.say(f"put({expression})")
        assert isinstance(handle, str)
        assert "Error" not in handle, handle
        self._put.append(handle)
        return handle

    def clear(self) -> None:
        """Drop what it has put, and keep nothing."""
        self.do(*(f"drop({handle!r})" for handle in self._put), "kept.clear()", "settle()")
        self._put.clear()

    def kill(self) -> None:
        self._program.kill()


class SharedNode:
    """A node and its functions, which tests use one after the other."""

    def __init__(self, cluster: TwoNodes, *options: str) -> None:
        cluster.scheduler()
        self.cluster = cluster
        self.address, self.manager = one_node(cluster, *options)
        self._functions: dict[tuple[str, str], DataFunction] = {}

    def function(self, name: str, tenant: str = "team") -> DataFunction:
        """The function of that name, which goes on when a test ends."""
        key = name, tenant
        if key not in self._functions:
            self._functions[key] = data_function(self.cluster, self.address, name, tenant)
        return self._functions[key]

    def clear(self) -> None:
        """Leave nothing of a test's data."""
        for function in self._functions.values():
            function.clear()
        wait_until(lambda: not open_data(self.manager), "no memory is open")


@contextmanager
def shared_node(folder: Path, *options: str) -> Iterator[SharedNode]:
    """Such a node, with a scheduler of its own."""
    with TwoNodes(folder) as cluster:
        yield SharedNode(cluster, *options)


def data_function(
    cluster: TwoNodes, address: str, name: str = "program", tenant: str = "team"
) -> DataFunction:
    """A function whose own node's manager is at this address."""
    return DataFunction(cluster.program(_FUNCTION, address, name, tenant))


def one_node(cluster: TwoNodes, *options: str) -> tuple[str, Daemon]:
    """The address of a node's manager, and its process."""
    address = f"unix:{cluster.folder / 'n.sock'}"
    return address, cluster.node("n", address, *options, memory="2GiB")


def open_data(manager: Daemon) -> list[str]:
    """The memory and files of data that the node's manager has open."""
    found = []
    for entry in Path(f"/proc/{manager.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it was closed meanwhile
            target = str(entry.readlink())
            if "gpufaas-data" in target or "/spill/data/" in target:
                found.append(target)
    return found


def kill_workers(manager: Daemon) -> None:
    """Kill every process that has a model, or may get one."""
    for server in _children(manager.pid):
        for worker in _children(server):
            with suppress(ProcessLookupError):  # a spare one that was not needed any more
                os.kill(worker, signal.SIGKILL)


def _children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    return [int(child) for child in found.split()]
