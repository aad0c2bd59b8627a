"""The process that makes workers: torch is imported here once, CUDA and OpenMP never touched.

Run by `__main__.py` with its end of a socket pair with the manager. It ends when that closes, and
its workers end with it.
"""

import contextlib
import ctypes
import gc
import importlib.util
import os
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch

from gpu_manager.cuda.libraries import open_libraries
from gpu_manager.emulated.memory_pool import MemoryPool
from gpu_manager.worker import orders
from gpu_manager.worker.life import live
from gpu_manager.worker.program.allowed_operators import preload
from gpu_manager.worker.sandbox import die_with, separate
from torch_shim.errors import BadFrame, WireError
from torch_shim.wire.protocol import FrameKind, FrameSocket

_PAGE_OUT = 21  # MADV_PAGEOUT; kernels before 5.4 do not know it, and keep the pages
_OF_CUDA = ("/nvidia/", "libtorch_cuda", "libc10_cuda", "/cuda/bindings/")


def serve(manager: FrameSocket, begin: Callable[[int], NoReturn]) -> None:
    """Fork on demand until the manager hangs up. One thread, as a process that forks must have."""
    while True:
        frame = manager.receive()
        order = orders.read(frame)
        if not isinstance(order, orders.Fork) or len(frame.descriptors) != 1:
            raise BadFrame(f"{type(order).__name__} to the fork server")
        with _nothing_reaped():
            pid = os.fork()
            if not pid:
                begin(frame.descriptors[0])
            pidfd = os.pidfd_open(pid)
        os.close(frame.descriptors[0])
        manager.send(FrameKind.REPORT, orders.Forked(order.number, pid), (), [pidfd])
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


def main(descriptors: list[int], missing: list[str], *, emulated: bool, keeps_stderr: bool) -> None:
    """Serve forks to the manager at the first one's other end; `missing` is for its log.

    The second descriptor, if there is one, is that of the library of emulated GPUs' pools.
    With `keeps_stderr` workers write where the manager does: what libcuda, torch or abort say.
    """
    descriptor, *libraries = descriptors
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    manager = FrameSocket(socket.socket(fileno=descriptor))
    _load_torchvision()
    preload()
    pool = None
    for library in libraries:
        pool = MemoryPool(Path(f"/proc/self/fd/{library}"))
        os.close(library)
    if not emulated:
        open_libraries()
    gc.collect()
    gc.freeze()  # so that a worker's collector writes to no page that it shares with the others
    gc.enable()  # `__main__.py` has imported all this without it
    if emulated:
        _page_out_cuda()
    signal.signal(signal.SIGCHLD, _reap)
    manager.send(FrameKind.REPORT, orders.Ready(missing, 0))
    begin = partial(_begin, os.getpid(), missing, pool, 2 if keeps_stderr else 3)
    with contextlib.suppress(WireError):
        serve(manager, begin)


def _load_torchvision() -> None:
    """Have torchvision's operators registered, where it is installed.

    Its library alone does that in milliseconds; importing the package takes a second.
    """
    found = importlib.util.find_spec("torchvision")
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        for library in Path(folder).glob("_C*.so"):
            with contextlib.suppress(OSError):  # one that was built for another torch
                torch.ops.load_library(str(library))  # type: ignore[no-untyped-call] # torch gives it no types


def _page_out_cuda() -> None:
    """Give the memory back that CUDA's libraries took to be loaded: 155 MB that are not used again.

    It changes nothing but that: a page that is touched after all is read again.
    """
    libc = ctypes.CDLL(None)
    for line in Path("/proc/self/maps").read_text().splitlines():
        where, *_, path = line.split(maxsplit=5)
        if any(name in path for name in _OF_CUDA):
            begin, end = (int(address, 16) for address in where.split("-"))
            libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _PAGE_OUT)


def _begin(
    parent: int, missing: list[str], pool: MemoryPool | None, silenced: int, descriptor: int
) -> NoReturn:
    """In the new process: be a worker, holding nothing else of the fork server's."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        die_with(parent)
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in range(silenced):
            os.dup2(nothing, stream)
        os.closerange(3, descriptor)
        os.closerange(descriptor + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        live(socket.socket(fileno=descriptor), parent, missing + separate(missing), pool)
    finally:
        os._exit(1)
