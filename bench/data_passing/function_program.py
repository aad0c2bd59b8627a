"""A function under the shim that puts, gets and computes as it is told: one line of JSON each.

`python -m bench.data_passing.function_program SCALE BYTES`: its model multiplies by SCALE.
"""

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from torch_shim.data import put_and_get

_COLUMNS = 1024


class Scale(torch.nn.Module):
    """Multiplies each column by a weight."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((_COLUMNS,), scale))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The product."""
        return x * self.weight


class Total(torch.nn.Module):
    """The sum of all elements, times a weight: a small answer to a large input."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(scale))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum."""
        return x.sum() * self.weight


def main() -> None:
    """Answer orders until standard input ends."""
    torch.set_grad_enabled(False)
    scale, size_bytes = float(sys.argv[1]), int(sys.argv[2])
    host = torch.ones(size_bytes // 4 // _COLUMNS, _COLUMNS)
    there = host.cuda()
    make, use = Scale(scale).cuda(), Total(scale).cuda()
    kept: dict[str, Any] = {}
    make(there), use(there).item()  # in no way that brings what the first one makes
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        order, *arguments = json.loads(line)
        answer: dict[str, Any] = {}
        match order:
            case "make":  # a result that stays on the worker
                kept["made"] = make(there)
            case "bring":  # a result in the function's own memory
                kept["made"] = make(there).cpu()
            case "put":
                answer["handle"], answer["spent_s"] = timed(partial(put_and_get.put, kept["made"]))
            case "get":
                kept["got"], answer["spent_s"] = timed(partial(put_and_get.get, *arguments))
            case "look":
                kept["got"], answer["spent_s"] = timed(kept["got"].cpu)
            case "use":
                answer["total"], answer["spent_s"] = timed(lambda: use(kept["got"].cuda()).item())
            case "use_own":
                answer["total"], answer["spent_s"] = timed(lambda: use(there).item())
            case "drop":
                kept.clear()
                for handle in arguments:
                    put_and_get.drop(handle)
                put_and_get.settle()
            case _:
                answer["error"] = f"no order: {order}"
        print(json.dumps(answer), flush=True)


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """The result, and the seconds that it took."""
    began_s = time.perf_counter()
    found = work()
    return found, time.perf_counter() - began_s


if __name__ == "__main__":
    main()
