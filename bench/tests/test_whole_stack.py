"""A stack of the benches: without an etcd, its policy, its caches."""

import tempfile
from pathlib import Path

import pytest

from bench.measure.whole_stack import whole_stack


@pytest.mark.slow
def test_stack_keeps_its_state_in_memory_when_it_has_no_etcd() -> None:
    options = ["--without-etcd", "--devices", "cpu:1", "--gpu-memory", "128MiB"]
    # A socket's path has 107 bytes at most: pytest's own folders are too deep.
    with (
        tempfile.TemporaryDirectory(prefix="st") as name,
        whole_stack(_filled(name), options) as up,
    ):
        up.set_policy("lb")
        up.evict_all()
        assert up.scheduler.get("/policy")["policy"] == "lb"
        assert len(up.cluster()["gpus"]) == 1
        assert not up.folder.etcd.exists()


def _filled(name: str) -> Path:
    """A folder as the benches have it."""
    folder = Path(name)
    (folder / "build").mkdir()
    return folder
