"""The benches for a real GPU on an emulated one: whether they measure, not what."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
LINEAR_BYTES = (4 * 4 + 4) * 4
RESNET18_BYTES = 11_689_512 * 4  # its parameters; buffers come on top


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ) | {"OMP_NUM_THREADS": "1"}  # noqa: TID251 - for a child
    program = [sys.executable, "-m", f"bench.{name}", *arguments]
    return subprocess.run(
        program, cwd=ROOT, env=environment, text=True, capture_output=True, check=False
    )


def kept(name: str, folder: Path, *arguments: str) -> Any:
    found = run(name, "--devices", "cpu:1", "--output", str(folder), *arguments)
    assert found.returncode == 0, found.stderr
    (path,) = folder.iterdir()
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", ["gpu.resident", "gpu.latency"])
def test_bench_refuses_in_one_line_when_there_is_no_such_gpu(name: str, tmp_path: Path) -> None:
    found = run(name, "--devices", "cuda:99", "--output", str(tmp_path))

    assert found.returncode == 1
    (line,) = found.stderr.splitlines()
    assert line.startswith(f"bench.{name}: ")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_resident_bench_stops_when_a_model_must_leave(tmp_path: Path) -> None:
    models = ("resnet18", "squeezenet1_1")
    found = kept("gpu.resident", tmp_path, "--gpu-memory", "120MiB", "--models", *models)

    assert (found["resident"], found["of"]) == (1, 2)
    assert found["emulated"] is True
    (entry,) = found["models"]
    assert entry["model"] == "resnet18"
    assert entry["weights_bytes"] > RESNET18_BYTES
    assert entry["beyond_weights_bytes"] == entry["resident_bytes"] - entry["weights_bytes"]


@pytest.mark.slow
def test_latency_bench_measures_calls_and_loads_when_emulated(tmp_path: Path) -> None:
    found = kept("gpu.latency", tmp_path, "--models", "linear", "--rounds", "1")

    assert [(row["batch"], row["how"]) for row in found["warm"]] == [
        (1, "call"),
        (1, "whole"),
        (32, "call"),
        (32, "whole"),
    ]
    assert all(row["ratio"] > 0 for row in found["warm"])
    (first,) = found["first_answers"]
    assert first["weights_bytes"] == LINEAR_BYTES
    assert first["first_s"] > first["load_s"] > 0
