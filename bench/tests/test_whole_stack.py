"""A stack of the benches: without an etcd, its policy, its caches."""

from pathlib import Path

import pytest

from bench.measure.whole_stack import whole_stack


@pytest.mark.slow
def test_stack_keeps_its_state_in_memory_when_it_has_no_etcd(tmp_path: Path) -> None:
    (tmp_path / "build").mkdir()
    options = ["--without-etcd", "--devices", "cpu:1", "--gpu-memory", "128MiB"]
    with whole_stack(tmp_path, options) as running:
        running.set_policy("lb")
        running.evict_all()
        assert running.scheduler.get("/policy")["policy"] == "lb"
        assert len(running.cluster()["gpus"]) == 1
        assert not running.folder.etcd.exists()
