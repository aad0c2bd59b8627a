"""Processes of a tree, and what they use."""

import os
import subprocess
import sys
import time

from bench.measure.process_usage import PartUsage, process_tree, processor_s, usage_by_part


def test_tree_has_a_process_and_all_that_descend_from_it() -> None:
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE) as parent:
        try:
            found = process_tree(parent.pid)
            patience_s = time.monotonic() + 20.0
            while len(found) < 2 and time.monotonic() < patience_s:
                time.sleep(0.02)
                found = process_tree(parent.pid)
        finally:
            assert parent.stdin is not None
            parent.stdin.write(b"\n")
            parent.stdin.flush()
            parent.wait()

    assert parent.pid in found
    assert len(found) == 2
    assert os.getpid() not in found
    assert all(each.pss_bytes > 0 == each.torch_bytes for each in found.values())


def test_processor_s_grows_with_work() -> None:
    before_s, began_s = processor_s(os.getpid()), time.process_time()
    while time.process_time() - began_s < 0.1:
        sum(range(1_000))

    assert 0.05 < processor_s(os.getpid()) - before_s < 5.0


def test_usage_by_part_sums_the_processes_of_a_part() -> None:
    found = usage_by_part(
        {1: PartUsage("a", 10, 1.0, 10), 2: PartUsage("b", 5, 0.5), 3: PartUsage("a", 1, 2.0)}
    )

    assert found == {"a": PartUsage("a", 11, 3.0, 10), "b": PartUsage("b", 5, 0.5)}


def test_tree_tells_the_memory_of_processes_that_have_loaded_torch() -> None:
    script = "import sys, torch; print('ready', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            assert child.stdout.readline() == b"ready\n"
            found = process_tree(child.pid)[child.pid]
        finally:
            child.stdin.write(b"\n")
            child.stdin.flush()
            child.wait()

    assert found.torch_bytes == found.pss_bytes > 0
