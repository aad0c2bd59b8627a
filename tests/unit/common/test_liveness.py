"""A frozen process is told from a busy, a starved, a debugged and a jointly suspended one."""

import asyncio
import sys

import pytest

from common.liveness import LivenessRecord, LivenessTimes, ProcessLook, until_frozen

TIMES = LivenessTimes()


def verdicts(record: LivenessRecord, state: str, *, seconds: float, ticks: bool = False) -> str:
    """The last verdict of looks at a process in this state; `ticks` has it compute meanwhile."""
    verdict = ""
    count = round(seconds / TIMES.look_s)
    for number in range(count):
        look = ProcessLook(state, number if ticks else 7)
        verdict = verdict or record.look(look, (number + 1) * TIMES.look_s)
    return verdict


def answered_once() -> LivenessRecord:
    record = LivenessRecord(TIMES, 0.0)
    record.answered(0.0)
    return record


def test_stopped_process_is_frozen_within_two_seconds() -> None:
    assert not verdicts(answered_once(), "T", seconds=0.5)
    assert "stopped" in verdicts(answered_once(), "T", seconds=2.0)


def test_stop_counts_from_the_first_look_that_showed_it() -> None:
    record = answered_once()
    assert not record.look(ProcessLook("S", 7), 0.5)
    assert not record.look(ProcessLook("T", 7), 1.8)  # stopped since the look before, or just now
    assert not record.look(ProcessLook("T", 7), 2.3)
    assert not record.look(ProcessLook("S", 7), 2.6)
    assert not record.look(ProcessLook("T", 7), 2.9)
    assert not record.look(ProcessLook("T", 7), 3.4)
    assert "stopped by a signal 1.0 s ago" in record.look(ProcessLook("T", 7), 3.9)


def test_stopped_process_is_frozen_even_if_it_never_answered() -> None:
    assert "stopped" in verdicts(LivenessRecord(TIMES, 0.0), "T", seconds=3.5)


def test_blocked_process_is_frozen_when_it_neither_answers_nor_computes() -> None:
    assert "neither answered nor computed" in verdicts(answered_once(), "S", seconds=10)


@pytest.mark.parametrize("state", ["R", "D", "t"])
def test_process_is_alive_while_it_runs_waits_for_a_disk_or_is_debugged(state: str) -> None:
    assert not verdicts(answered_once(), state, seconds=60)


def test_process_is_alive_while_it_computes_without_answering() -> None:
    assert not verdicts(answered_once(), "S", seconds=60, ticks=True)


def test_starting_process_is_alive_until_its_start_takes_too_long() -> None:
    assert not verdicts(LivenessRecord(TIMES, 0.0), "S", seconds=60)
    assert "start" in verdicts(LivenessRecord(TIMES, 0.0), "S", seconds=120, ticks=True)


def test_waits_begin_again_when_the_watching_process_was_held_up_itself() -> None:
    record = answered_once()
    assert not record.look(ProcessLook("T", 7), 0.5)
    for look_s in (60.0, 60.5):  # the machine, or the whole stack, was suspended
        assert not record.look(ProcessLook("T", 7), look_s)
    assert "stopped" in record.look(ProcessLook("T", 7), 61.0)


_WORKS_ASIDE = """
import sys, threading, time
def work():
    end = time.monotonic() + 60
    while time.monotonic() < end:
        pass
if sys.argv[1] == "busy":
    threading.Thread(target=work, daemon=True).start()
time.sleep(60)
"""


@pytest.mark.parametrize(("kind", "frozen"), [("idle", True), ("busy", False)])
async def test_process_that_stops_answering_is_frozen_unless_one_of_its_threads_works(
    kind: str,
    frozen: bool,  # noqa: FBT001  # pytest passes parameters by name
) -> None:
    times = LivenessTimes(look_s=0.05, ask_s=0.05, blocked_s=0.5)
    answers = iter([True])

    async def once() -> bool:
        return next(answers, False)

    process = await asyncio.create_subprocess_exec(sys.executable, "-c", _WORKS_ASIDE, kind)
    try:
        watching = asyncio.create_task(until_frozen(process.pid, once, times))
        done, _ = await asyncio.wait({watching}, timeout=None if frozen else 3.0)
        assert bool(done) is frozen
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    finally:
        process.kill()
        await process.wait()
