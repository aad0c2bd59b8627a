"""`python -m bench.placement.walk`: what one placement runs through, as calls, files and changes.

A request arrives at a cluster of one idle GPU and one model that was registered, and is placed at
once. Calls of our own functions count; a change is a call in another file than the one before.
"""

import sys
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

from cache_manager.model.ids import GpuId, ModelId, NodeId, Tier
from scheduler.composition import make_core
from scheduler.model.events import GpuJoined, ModelRegistered, RequestArrived
from scheduler.model.values import ANY_GPU_TYPE, GpuSpec, ModelSpec, Request, RequestId

_ROOT = str(Path(__file__).parents[2])
_OURS = tuple(f"{_ROOT}/{room}/" for room in ("common", "cache_manager", "scheduler"))
_MODEL = ModelSpec(ModelId("m"), 1 << 30, {Tier.DISK: 1.0}, ((1, ANY_GPU_TYPE, 0.1),))


def main() -> None:
    """Print a row a policy."""
    print("| policy | calls | files | changes of file |\n| --- | ---: | ---: | ---: |")
    for policy in sys.argv[1:] or ("lb", "lalbo3", "gain"):
        files = walk(policy)
        changes = sum(before != after for before, after in pairwise(files))
        print(f"| {policy} | {len(files)} | {len(set(files))} | {changes} |")


def walk(policy: str) -> list[str]:
    """The file of each call, in order, while the core takes the request in."""
    core = make_core(policy)
    core.handle(GpuJoined(GpuSpec(GpuId("g0"), NodeId("n0"), 8 << 30)), 0.0)
    core.handle(ModelRegistered(_MODEL), 1.0)
    arrival = RequestArrived(Request(RequestId("r0"), "f", (_MODEL.id,)))
    files: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(_OURS):
            files.append(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        core.handle(arrival, 2.0)
    finally:
        sys.setprofile(None)
    return files


if __name__ == "__main__":
    main()
