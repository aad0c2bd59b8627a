"""What the gateway's benches rely on: processes and their costs, requests as written, figures."""

import os
import subprocess
import sys
import time

from bench.gateway_load import Figures, medians, request
from bench.gateway_zipf import chosen
from bench.idle import Process, by_name, cpu_s, tree


def test_tree_has_a_process_and_all_that_descend_from_it() -> None:
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE) as parent:
        try:
            found = tree(parent.pid)
            patience_s = time.monotonic() + 20.0
            while len(found) < 2 and time.monotonic() < patience_s:
                time.sleep(0.02)
                found = tree(parent.pid)
        finally:
            assert parent.stdin is not None
            parent.stdin.write(b"\n")
            parent.stdin.flush()
            parent.wait()

    assert parent.pid in found
    assert len(found) == 2
    assert os.getpid() not in found
    assert all(each.pss_bytes > 0 for each in found.values())


def test_cpu_s_grows_with_work() -> None:
    before_s, began_s = cpu_s(os.getpid()), time.process_time()
    while time.process_time() - began_s < 0.1:
        sum(range(1_000))

    assert 0.05 < cpu_s(os.getpid()) - before_s < 5.0


def test_by_name_sums_what_is_for_the_same() -> None:
    found = by_name({1: Process("a", 10, 1.0), 2: Process("b", 5, 0.5), 3: Process("a", 1, 2.0)})

    assert found == {"a": Process("a", 11, 3.0), "b": Process("b", 5, 0.5)}


def test_request_is_one_that_any_server_reads() -> None:
    assert request("/f", "X: y\r\n", b"body") == (
        b"POST /f HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nX: y\r\n"
        b"Content-Length: 4\r\n\r\nbody"
    )


def test_medians_are_of_each_figure_and_failures_are_summed() -> None:
    runs = [Figures(float(n), n / 8, n / 4, n, 0.5) for n in (3, 1, 2)]

    assert medians(runs) == Figures(2.0, 0.25, 0.5, 6, 0.5)


def test_zipf_calls_are_the_same_for_a_seed_and_mostly_of_the_first_models() -> None:
    calls = chosen(1)

    assert len(calls) == 650
    assert calls == chosen(1) != chosen(2)
    assert calls.count(0) > 3 * calls.count(15)
    assert set(calls) <= set(range(16))
