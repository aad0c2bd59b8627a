"""The parts of `make gpu` on an emulated GPU: whether they measure, not what."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.gpu.__main__ import PARTS
from bench.gpu.part import MEASURES
from bench.gpu.part_process import ROW

pytestmark = pytest.mark.group("gpu_benches", seconds=120)

ROOT = Path(__file__).parents[2]
RESNET18_BYTES = 11_689_512 * 4  # its parameters; buffers come on top


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ) | {"OMP_NUM_THREADS": "1"}  # noqa: TID251 - for a child
    program = [sys.executable, "-m", "bench.gpu.part", name, *arguments]
    return subprocess.run(
        program, cwd=ROOT, env=environment, text=True, capture_output=True, check=False
    )


def rows_of(name: str, *arguments: str) -> list[dict[str, Any]]:
    found = run(name, "--devices", "cpu:1", *arguments)
    assert found.returncode == 0, found.stderr
    marked = [line for line in found.stdout.splitlines() if line.startswith(ROW)]
    return [json.loads(line.removeprefix(ROW)) for line in marked]


def test_every_part_can_be_run() -> None:
    assert [part.name for part in PARTS] == list(MEASURES)


@pytest.mark.parametrize("name", ["memory", "profile"])
def test_part_refuses_in_one_line_when_there_is_no_such_gpu(name: str) -> None:
    found = run(name, "--devices", "cuda:99")

    assert found.returncode == 1
    (line,) = found.stderr.splitlines()
    assert line.startswith(f"bench.gpu.part {name}: ")


@pytest.mark.slow
def test_memory_part_stops_when_a_model_must_leave() -> None:
    first, last, total = rows_of("memory", "--gpu-memory", "180MiB")

    assert (first["model"], first["resident"]) == ("resnet18", True)
    assert first["beyond_weights_bytes"] == first["ledger_bytes"] - first["weights_bytes"]
    assert last == {"model": "resnet50", "resident": False}
    assert total == {"resident": 1, "gpu_bytes": 180 << 20}


@pytest.mark.slow
def test_cold_part_accounts_for_the_whole_first_answer() -> None:
    rows = rows_of("cold")

    assert [row["first answer"] for row in rows] == ["new to the node", "evicted before"] * 2
    for row in rows:
        assert sum(row["stages_s"].values()) == pytest.approx(row["first_s"], abs=1e-3)
        assert row["stages_s"]["transfer"] > 0
        assert row["stages_s"]["compute"] > 0
