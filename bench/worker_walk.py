"""`python -m bench.worker_walk`: what one call runs through in a worker, as calls, files, changes.

The third call of a program, from the channel's read to the answer; with the features of a worker,
and without. Calls of our own functions on the channel's thread count; a change is a call in another
file than the one before.
"""

import sys
import threading
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from gpu_manager.worker.features import WorkerFeature
from gpu_manager.worker.life import FEATURES
from tests.kit.worlds.caller import LocalWorker, program, step
from torch_shim.wire.programs import Ref
from torch_shim.wire.protocol import FrameKind, FrameSocket

_ROOT = str(Path(__file__).parents[1])
_OURS = tuple(f"{_ROOT}/{room}/" for room in ("common", "gpu_manager", "torch_shim"))
_ARENA_BYTES = 1 << 20
_BEFORE, _CALLS = 2, 3  # the arena and the program come first


def main() -> None:
    """Print a row a worker, and with an argument each file's calls."""
    print("| worker | calls | files | changes of file |\n| --- | ---: | ---: | ---: |")
    for name, features in (("all features", FEATURES), ("none", ())):
        files = walk(features)
        changes = sum(before != after for before, after in pairwise(files))
        print(f"| {name} | {len(files)} | {len(set(files))} | {changes} |")
        for file in dict.fromkeys(files) if len(sys.argv) > 1 else ():
            print(f"    {files.count(file):3} {file.removeprefix(_ROOT)}")


def walk(features: Sequence[type[WorkerFeature]]) -> list[str]:
    """The file of each call, in order, while the worker answers the third call of a program."""
    requests: list[list[str]] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(_OURS):
            if code is FrameSocket.receive.__code__:
                requests.append([])
            if requests:
                requests[-1].append(code.co_filename)

    worker = LocalWorker(features=features)
    doubled = program(step("o:mul", Ref(0), 2), output=[Ref(1)])
    threading.setprofile(note)
    try:
        caller = worker.connect(arena_bytes=_ARENA_BYTES)
    finally:
        threading.setprofile(None)
    with caller:
        caller.define(doubled)
        for _ in range(_CALLS):
            caller.call(doubled, torch.ones(64))
        caller.ask(FrameKind.DROP, [])  # when it is read, the last call is over
    worker.join()
    return requests[_BEFORE + _CALLS - 1]


if __name__ == "__main__":
    main()
