"""What a watched process says of its memory, and what is made of it."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hunt.soak.attribution.heap_report import grown_entries, heap_section, split_of
from hunt.soak.attribution.watched_parts import WatchPlan, end_watch, watching
from tests.kit.waiting import wait_until

MIB = 1 << 20
# It is taken for a gateway by its command, leaks an object of its own kind, and makes cycles.
_LEAKING = """
import gc, sys
gc.disable()  # what it leaves is there until it is looked for
class Leaked:
    def __init__(self, text): self.text = text
kept = []
for number in range(500):
    kept.append(Leaked(f"text {number}"))
    cycle = []
    cycle.append(cycle)
print("ready", flush=True)
sys.stdin.read()
"""


def a_sample(private_mib: float, when: str = "", **more: Any) -> Mapping[str, Any]:
    return {
        "at_s": 1.0,
        "private_bytes": private_mib * MIB,
        "malloc_used_bytes": 0,
        "malloc_free_bytes": 0,
        "python_blocks": 0,
        "objects": 0,
        "types": {},
        "when": when,
        **more,
    }


@pytest.mark.parametrize(
    ("detail", "shown"),
    [("lines", "<string>:"), ("holders", "builtins.str < __main__.Leaked")],
)
def test_watched_part_says_what_it_has_until_the_end(
    tmp_path: Path, detail: str, shown: str
) -> None:
    variables = watching(WatchPlan(("gateway",), every_s=0.3, detail=detail), tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-c", _LEAKING, "gpufaas", "gateway"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=dict(variables),
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        path = tmp_path / f"gateway-{process.pid}.jsonl"
        wait_until(
            lambda: path.exists() and b'"__main__.Leaked": 500' in path.read_bytes(),
            "a sample with what leaked",
        )
        (file,) = end_watch(tmp_path)
    finally:
        process.communicate()

    samples = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert samples[-1]["when"] == "after malloc_trim"
    assert samples[-1]["private_bytes"] > MIB
    assert samples[-2]["garbage"]["builtins.list"] >= 499  # the last cycle is held
    assert samples[-1]["malloc_used_bytes"] > 0
    assert any(text.startswith(shown) for text in samples[-3]["details"])
    assert f"The memory of gateway-{process.pid}" in heap_section(file)


def test_other_process_is_not_watched(tmp_path: Path) -> None:
    variables = watching(WatchPlan(("gateway",)), tmp_path)

    command = [sys.executable, "-c", "", "gpufaas", "scheduler"]
    subprocess.run(command, check=True, env=dict(variables))

    assert end_watch(tmp_path) == []
    assert watching(WatchPlan(), tmp_path) == {}


def test_growth_is_split_into_garbage_free_memory_and_the_rest() -> None:
    samples = [
        *(a_sample(mib) for mib in (50.0, 60.0, 70.0)),
        a_sample(80.0, "before giving back"),
        a_sample(75.0, "after a collection of 10 objects"),
        a_sample(66.0, "after malloc_trim"),
    ]

    assert split_of(samples) == (
        "From the middle to the end 20.0 MiB more. A collection gave back 5.0, malloc_trim then "
        "9.0: what is left is 6.0 more than in the middle."
    )
    assert split_of(samples[:4]) == "It ended before it could say what it has."


def test_entries_that_grew_are_shown_the_most_first() -> None:
    before, after = {"a": 10, "b": 5, "c": 7}, {"a": 100, "b": 300, "c": 8, "new": 60}

    assert grown_entries(before, after, 50) == [("b", 295), ("a", 90), ("new", 60)]
