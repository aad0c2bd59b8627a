"""The process that makes workers: torch is imported here once, CUDA and OpenMP never touched.

Run by `__main__.py` with its end of a socket pair with the manager. It ends when that closes, and
its workers end with it.
"""

import contextlib
import gc
import importlib.util
import os
import resource
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import torch

from gpu_manager.worker import orders
from gpu_manager.worker.main import live
from gpu_manager.worker.operators import preload
from gpu_manager.worker.sandbox import die_with
from torch_shim.errors import BadFrame, WireError
from torch_shim.protocol import Kind
from torch_shim.wire import Wire


def serve(manager: Wire, missing: list[str]) -> None:
    """Fork on demand until the manager hangs up. One thread, as a process that forks must have."""
    parent = os.getpid()
    while True:
        frame = manager.receive()
        order = orders.read(frame.kind, frame.meta)
        if not isinstance(order, orders.Fork) or len(frame.descriptors) != 1:
            raise BadFrame(f"{frame.kind.name} to the fork server")
        with _nothing_reaped():
            pid = os.fork()
            if not pid:
                _begin(frame.descriptors[0], parent, missing)
            pidfd = os.pidfd_open(pid)
        os.close(frame.descriptors[0])
        manager.send(Kind.FORKED, list(orders.Forked(order.number, pid)), (), [pidfd])
        os.close(pidfd)


@contextlib.contextmanager
def _nothing_reaped() -> Iterator[None]:
    """While a process that was just made is looked up by its number."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    yield
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})


def _reap(*_: object) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def main(descriptor: int, missing: list[str]) -> None:
    """Be the fork server of whoever holds the socket's other end; `missing` is for its log."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    manager = Wire(socket.socket(fileno=descriptor))
    _load_torchvision()
    preload()
    gc.collect()
    gc.freeze()  # so that a worker's collector writes to no page that it shares with the others
    signal.signal(signal.SIGCHLD, _reap)
    manager.send(Kind.READY, list(orders.Ready(missing, 0)))
    with contextlib.suppress(WireError):
        serve(manager, missing)


def _load_torchvision() -> None:
    """Have torchvision's operators registered, where it is installed.

    Its library alone does that in milliseconds; importing the package takes a second.
    """
    found = importlib.util.find_spec("torchvision")
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        for library in Path(folder).glob("_C*.so"):
            with contextlib.suppress(OSError):  # one that was built for another torch
                torch.ops.load_library(str(library))  # type: ignore[no-untyped-call] # torch gives it no types


def _begin(descriptor: int, parent: int, missing: list[str]) -> NoReturn:
    """In the new process: be a worker, holding nothing of the fork server's."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        die_with(parent)
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(nothing, stream)
        os.closerange(3, descriptor)
        os.closerange(descriptor + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        live(socket.socket(fileno=descriptor), parent, missing)
    finally:
        os._exit(1)
