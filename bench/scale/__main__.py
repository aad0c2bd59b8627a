"""`python -m bench.scale`: the messages of one leader at 10,000 GPUs and 100,000 calls a second."""

import argparse
import time

from bench.scale.large_cluster import LargeCluster, Shape, Traffic
from bench.scale.message_counts import Message
from scheduler.settings import Serving

_LARGE = 1_000.0


def main() -> None:
    """Simulate the same calls with kept leases and without, and show the rates."""
    parser = argparse.ArgumentParser(prog="bench.scale", description=__doc__)
    usual = Shape()
    parser.add_argument("--gpus", type=int, default=usual.gpus)
    parser.add_argument("--gateways", type=int, default=usual.gateways)
    parser.add_argument("--functions", type=int, default=usual.functions)
    parser.add_argument("--calls", type=int, default=usual.calls, help="a second")
    parser.add_argument("--run-s", type=float, default=usual.run_s, help="the mean of a call")
    parser.add_argument("--policy", default=usual.policy)
    parser.add_argument("--warm", type=float, default=6.0, help="seconds that are not counted")
    parser.add_argument("--seconds", type=float, default=3.0, help="that are counted")
    words = vars(parser.parse_args())
    warm_s, seconds = words.pop("warm"), words.pop("seconds")
    shape = Shape(**words)
    print(f"{shape}\n")
    found = {}
    for name, terms in (("kept", Serving().standing), ("one call a lease", None)):
        began_s = time.perf_counter()
        found[name] = LargeCluster(shape, terms).run(warm_s, seconds)
        print(f"{name}: simulated in {time.perf_counter() - began_s:.0f} s", flush=True)
    _show(found)


def _show(found: dict[str, Traffic]) -> None:
    print("\n| a second | " + " | ".join(found) + " |")
    print("| --- |" + " ---: |" * len(found))
    rows = {
        "calls that began": [each.calls / each.seconds for each in found.values()],
        "of these under a lease that an earlier call left, %": [
            100.0 * each.under_kept / max(1, each.calls) for each in found.values()
        ],
        "mean wait of a call, ms": [
            1e3 * each.waited_s / max(1, each.calls) for each in found.values()
        ],
        **{
            message.value: [each.counts.rate(message, each.seconds) for each in found.values()]
            for message in Message
        },
        "all messages": [each.counts.rate_of_messages(each.seconds) for each in found.values()],
        "seconds of the core": [each.core_s / each.seconds for each in found.values()],
    }
    for name, values in rows.items():
        digits = 0 if max(values) >= _LARGE else 2
        print(f"| {name} | " + " | ".join(f"{value:,.{digits}f}" for value in values) + " |")


if __name__ == "__main__":
    main()
