"""`python -m bench.gateway.walk`: which files an HTTP call of a GPU function goes through.

A call whose lease is asked for, and the next one, which finds it kept: the gateway with its HTTP
server and clients, the instance, and the scheduler each have a thread, by which calls of our own
functions count. What others do meanwhile, such as beats of a stream, is not left out.
"""

import asyncio
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Coroutine
from itertools import pairwise
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

from bench.gateway.part_processes import PathPart, calls, serve_gateway, serve_scheduler
from bench.measure.child_process import ParentPipe
from gateway_ext.runtime.process_life import listening
from gateway_ext.runtime.server import FunctionServer
from gateway_ext.runtime.settings import RuntimeSettings

_ROOT = str(Path(__file__).parents[2])
_ROOMS = ("common", "cache_manager", "scheduler", "gateway_ext")
_OURS = tuple(f"{_ROOT}/{room}/" for room in _ROOMS)
_PARTS = {"service": "instance", "handler_0": "instance"}  # by the names of the runtime's threads
_SETTLED_S = 0.05


class _Walk:
    """The files that each part's calls are in, one after the other."""

    def __init__(self) -> None:
        self.files: defaultdict[str, list[str]] = defaultdict(list)
        self.is_on = False

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        if self.is_on and event == "call" and frame.f_code.co_filename.startswith(_OURS):
            name = threading.current_thread().name
            self.files[_PARTS.get(name, name)].append(frame.f_code.co_filename)


def main() -> None:
    """Print a row for each call and part; with --files also the files."""
    walk = _Walk()
    threading.setprofile(walk.note)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_walked(walk, str(Path(folder, "function"))))


async def _walked(walk: _Walk, path: str) -> None:
    server = FunctionServer(RuntimeSettings(listen=f"unix:{path}"))
    server.start()
    server.listen(listening(f"unix:{path}"))
    server.ready(lambda event, _: event.body)
    scheduler, url = _in_thread("scheduler", serve_scheduler)
    gateway, own_url = _in_thread(
        "gateway", lambda pipe: serve_gateway(pipe, PathPart.GPU, path, url)
    )
    port = int(own_url.rpartition(":")[2])
    first, second, *_ = calls()
    print("| call | part | calls | files | changes of file |\n| --- | --- | ---: | ---: | ---: |")
    for name, data in (("", second), ("fresh lease", first), ("kept lease", first)):
        walk.files.clear()
        walk.is_on = True
        await _answered(port, data)
        await asyncio.sleep(_SETTLED_S)
        walk.is_on = False
        if name:  # the call before them makes connections
            _show(name, walk.files)
    scheduler.close()
    gateway.close()


def _in_thread(
    name: str, serve: Callable[[ParentPipe], Coroutine[Any, Any, None]]
) -> tuple[Connection, str]:
    """Serve in a thread of this name, until the pipe is closed; the address, once it is ready."""
    here, there = Pipe()
    part = serve(ParentPipe(there))
    threading.Thread(target=asyncio.run, args=(part,), name=name, daemon=True).start()
    address: str = here.recv()
    return here, address


async def _answered(port: int, data: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    await reader.readuntil(b"hi")
    writer.close()


def _show(call: str, files: dict[str, list[str]]) -> None:
    for part, walked in sorted(files.items()):
        changes = sum(before != after for before, after in pairwise(walked))
        print(f"| {call} | {part} | {len(walked)} | {len(set(walked))} | {changes} |")
        if "--files" in sys.argv:
            print("\n".join(sorted(name.removeprefix(f"{_ROOT}/") for name in set(walked))))


if __name__ == "__main__":
    main()
