"""`python -m bench.large_data`: what large tensors cost, natively and through the shim.

The two processes take turns. Both compute the same numbers, which is checked.
"""

import argparse
import sys
from statistics import median
from typing import NamedTuple

from bench.measure.native_and_shim import NativeAndShim
from bench.measure.report import MeasurementFailed

_WAYS = {
    "through": "in from the CPU, out to the CPU",
    "resident": "in and out as GPU tensors, the input written before each call",
    "in": "in from the CPU, a small answer",
    "resident_in": "in as a GPU tensor that is written before each call, a small answer",
    "out": "small in, out to the CPU",
}
_PROGRAM = """
import json, sys, time
import torch

way, count, rounds = sys.argv[1], int(sys.argv[2]) // 4, int(sys.argv[3])
device = "cuda" if torch.cuda.is_available() else "cpu"

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        if way in ("in", "resident_in"):
            return (x.view(-1, 1000).sum(1) * self.weight).mean()
        if way == "out":
            return (x * self.weight).view(-1, 1).expand(-1, count // x.numel()).reshape(-1)
        return x * self.weight + 1

model = Net().eval().to(device)
size = 1000 if way == "out" else count
host = torch.arange(size, dtype=torch.float32) / size
there = host.to(device)
spent_s, sums = [], []
with torch.no_grad():
    for number in range(rounds):
        if way.startswith("resident"):
            there[: 1] = number
        else:
            host[: 1] = number
        began_s = time.perf_counter()
        result = model(there if way.startswith("resident") else host.to(device))
        if way in ("through", "out"):
            result = result.cpu()
        seen = result.view(-1)[-1].item()
        spent_s.append(time.perf_counter() - began_s)
        sums.append([seen, result.double().sum().item()])
        del result
print(json.dumps({"spent_s": spent_s, "sums": sums}))
"""


class Rounds(NamedTuple):
    """What one process measured, in order."""

    spent_s: list[float]
    sums: list[list[float]]

    def warm_s(self) -> float:
        """The middle one of the calls after the first half."""
        return median(self.spent_s[len(self.spent_s) // 2 :])


def main() -> int:
    """Measure, print a table, and keep it if asked to."""
    bench = NativeAndShim("large_data", "Large data", _PROGRAM, _WAYS)
    add = bench.parser.add_argument
    add("--megabytes", type=int, default=200, metavar="N", help="a tensor (200)")
    add("--rounds", type=int, default=12, metavar="N", help="calls a process (12)")
    options = bench.parser.parse_args()
    return bench.measure(
        options,
        f"Tensors of {options.megabytes} MB, a graph of two steps, {options.rounds} calls a "
        "process, of which the second half is the warm one",
        "native | shim | shim / native | first call",
        lambda way: _row(bench, way, options),
    )


def _row(bench: NativeAndShim, way: str, options: argparse.Namespace) -> str:
    pairs = bench.pairs(Rounds, way, (options.megabytes * 1_000_000, options.rounds), options)
    if any(native.sums != shim.sums for native, shim in pairs):
        raise MeasurementFailed(f"the numbers of {way} differ")
    native = median(one.warm_s() for one, _ in pairs)
    ours = median(one.warm_s() for _, one in pairs)
    ratio = median(shim.warm_s() / one.warm_s() for one, shim in pairs)
    first = median(shim.spent_s[0] for _, shim in pairs)
    return f"{native * 1e3:.0f} ms | {ours * 1e3:.0f} ms | {ratio:.2f} | {first * 1e3:.0f} ms"


if __name__ == "__main__":
    sys.exit(main())
