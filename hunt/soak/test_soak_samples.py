"""What a soak samples: processes by the system's numbers, answers, and pictures of few points."""

import subprocess
import sys

from hunt.soak.growth_picture import thinned
from hunt.soak.mixed_load import CALLS, unexpected_answers
from hunt.soak.part_samples import PartSample, TreeSample, sample_tree
from hunt.soak.soak_growth import SeriesPoint
from hunt.soak.soak_sampler import SeriesName, values_of

_CHILD = """
import os, threading
fd = os.memfd_create("soak")
os.write(fd, bytes(1 << 20))
again = os.dup(fd)
stop = threading.Event()
threading.Thread(target=stop.wait).start()
print("ready", flush=True)
input()
stop.set()
"""


def test_sample_counts_processes_threads_descriptors_and_files_in_memory() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            assert child.stdout.readline() == b"ready\n"
            found = sample_tree(child.pid)
        finally:
            child.stdin.write(b"\n")
            child.stdin.flush()
            child.wait()

    (part,) = found.parts.values()
    assert (part.processes, part.threads, part.memfds) == (1, 2, 2)
    assert part.descriptors >= 5
    assert 0 < part.private_bytes <= part.pss_bytes <= part.rss_bytes
    assert (found.memfds, found.memfd_bytes) == (1, 1 << 20)


def test_values_are_named_by_part_and_bytes_have_a_coarser_resolution() -> None:
    tree = TreeSample({"gateway": PartSample(1, 2, 3, 4, 5, 6, 7)}, 8, 9)

    found = values_of(tree)

    assert found[SeriesName("gateway", "threads")] == 2.0
    assert found[SeriesName("gateway", "private bytes")] == 7.0
    assert found[SeriesName("all", "files in memory")] == 8.0
    assert SeriesName("gateway", "private bytes").resolution == 1 << 20
    assert SeriesName("gateway", "threads").resolution == 2.0
    assert SeriesName("gateway", "private bytes").shown(3 << 20) == "3.0 MiB"


def test_answers_that_no_limit_explains_are_counted_with_an_example() -> None:
    statuses = {"hello": {"200": 9, "429": 1}, "classify": {"502": 2, "no answer": 1}}

    found = unexpected_answers(statuses, {("classify", 502): b"gone"})

    assert found == {"classify: 502 gone": 2, "classify: no answer": 1}


def test_calls_are_of_all_examples_and_their_shares_are_whole() -> None:
    assert {each.body_of for each in CALLS} == {"hello", "classify", "pipeline", "generate"}
    assert round(sum(each.share for each in CALLS), 6) == 1.0


def test_picture_has_few_points_of_a_long_series() -> None:
    points = [SeriesPoint(float(at), float(at % 2)) for at in range(720)]

    found = thinned(points)

    assert len(found) == 180
    assert found[0] == SeriesPoint(1.5, 0.5)
    assert thinned([]) == []
