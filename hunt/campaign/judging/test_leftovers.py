"""The campaign's judgement of what is left: from made-up holdings, and from real processes."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from hunt.campaign.judging.leftovers import GpuBooks, Holdings, PartHoldings, left_over, merged
from hunt.campaign.worlds.process_holdings import marked, memfds, part_holdings, strays, zombies
from tests.kit.waiting import wait_until

_MARK, _MARKED = "CAMPAIGN_TEST", f"{os.getpid()}/"  # of this run of the tests, and no other
BOOKS = GpuBooks(counted=100, named=100, models=2, granted=90, hosted=2, over=0)
_QUIET = Holdings(
    parts={"gateway": PartHoldings({"sockets": 20}, threads=8)},
    processes={"gateway": 1, "worker": 4},
    memfds=10,
    models=2,
    books={"g0": BOOKS},
)


def test_nothing_is_left_when_a_system_holds_what_it_held() -> None:
    assert left_over(_QUIET, _QUIET) == []
    fewer = replace(_QUIET, processes={"gateway": 1, "worker": 3}, memfds=2)
    assert left_over(_QUIET, fewer) == []
    elsewhere = replace(_QUIET, processes={"gateway": 1, "worker": 5}, models=3)
    assert left_over(_QUIET, elsewhere) == []


@pytest.mark.parametrize(
    "after",
    [
        replace(_QUIET, leases=("lease 7",)),
        replace(_QUIET, waiting=1),
        replace(_QUIET, node_leases=1),
        replace(_QUIET, strays=("12 python",)),
        replace(_QUIET, zombies=("13 (python)",)),
        replace(_QUIET, processes={"gateway": 1, "worker": 5}),
        replace(_QUIET, processes={"gateway": 1, "worker": 6}, models=3),
        replace(_QUIET, processes={"gateway": 1}),
        replace(_QUIET, memfds=40),
        replace(_QUIET, parts={"gateway": PartHoldings({"sockets": 40}, threads=8)}),
        replace(_QUIET, parts={"gateway": PartHoldings({"memfds": 9}, threads=8)}),
        replace(_QUIET, parts={"gateway": PartHoldings({"sockets": 20}, threads=30)}),
        replace(_QUIET, books={"g0": replace(BOOKS, counted=101)}),
        replace(_QUIET, books={"g0": replace(BOOKS, granted=101)}),
        replace(_QUIET, books={"g0": replace(BOOKS, hosted=3)}),
        replace(_QUIET, books={"g0": replace(BOOKS, over=1 << 30)}),
    ],
)
def test_whatever_is_left_is_found_once(after: Holdings) -> None:
    assert len(left_over(_QUIET, after)) == 1


def test_gateway_may_keep_connections_of_as_many_calls_as_there_were_at_once() -> None:
    kept = replace(_QUIET, parts={"gateway": PartHoldings({"sockets": 60}, threads=8)})
    assert left_over(_QUIET, kept, calls_at_once=40) == []
    assert len(left_over(_QUIET, kept, calls_at_once=39)) == 1
    elsewhere = replace(_QUIET, parts={"gateway": PartHoldings({"pipes": 60}, threads=8)})
    assert len(left_over(_QUIET, elsewhere, calls_at_once=80)) == 1


def test_base_is_the_most_of_all_quiet_moments() -> None:
    more = Holdings({"gateway": PartHoldings({"pipes": 3}, 9)}, {"worker": 6}, memfds=12)
    base = merged(_QUIET, more)
    assert base.parts["gateway"] == PartHoldings({"sockets": 20, "pipes": 3}, threads=9)
    assert base.processes == {"gateway": 1, "worker": 6}
    assert base.memfds == 12


@contextmanager
def child(program: str) -> Iterator[int]:
    """A process with our mark, once it has said a line."""
    command = [sys.executable, "-c", f"{program}\nprint(flush=True)\ninput()"]
    environment = {**os.environ, _MARK: _MARKED}  # noqa: TID251 - for a child
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.communicate(b"\n")


def test_descriptors_and_shared_memory_of_a_process_are_counted() -> None:
    with child("pass") as idle, child("import os\nfor n in range(9): os.memfd_create('m')") as busy:
        before, after = part_holdings(idle), part_holdings(busy)
        assert after.descriptors.get("memfds", 0) == before.descriptors.get("memfds", 0) + 9
        assert memfds([idle, busy]) == memfds([idle]) + 9
        holdings = [Holdings({"it": one}) for one in (before, after)]
        assert left_over(*holdings) == ["it: 0 descriptors of memfds before, 9 now"]


def test_stray_and_unburied_processes_are_found() -> None:
    with child(
        "import subprocess, sys\nended = subprocess.Popen([sys.executable, '-c', ''])"
    ) as it:
        ours = marked([f"{_MARK}={_MARKED}".encode()])
        assert it in ours
        wait_until(lambda: zombies(ours), "the child's child has ended")
        (text,) = zombies(ours)
        assert text.endswith(f" of {ours[it][:100]}")
        ours = marked([f"{_MARK}={_MARKED}".encode()])
        assert strays(ours, [os.getpid()]) == ()
        assert len(strays(ours, [])) == len(ours) == 1
