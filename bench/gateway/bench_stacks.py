"""Stacks with the functions of the gateway's benches, warm enough to be measured."""

import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from bench.gateway import bench_functions
from bench.measure.whole_stack import StackNotReady, WholeStack, whole_stack

_WARM_CALLS, _PAUSE_S = 200, 0.1
_NO_VARIABLES: Mapping[str, str] = {}


@contextmanager
def stack_of_builds(
    *options: str, variables: Mapping[str, str] = _NO_VARIABLES
) -> Iterator[WholeStack]:
    """`gpufaas up` in a temporary folder, with the builds of the bench's functions."""
    with tempfile.TemporaryDirectory(prefix="bench") as name:
        root = Path(name)
        root.chmod(0o755)  # functions are other users
        bench_functions.write_builds(root / "build")
        with whole_stack(root, options, variables) as running:
            yield running


def call_until_leased(running: WholeStack, name: str, body: bytes) -> None:
    """Call a GPU function until the gateway has leases for its calls, or StackNotReady."""
    leased = 0
    for _ in range(_WARM_CALLS):
        before = running.cache()
        running.call(name, body)
        after = running.cache().since(before)
        leased = leased + 1 if after.hits + after.misses else 0
        if leased > 1:
            return
        time.sleep(_PAUSE_S)
    raise StackNotReady(f"{name}: no lease in {_WARM_CALLS} calls")
