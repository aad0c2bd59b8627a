"""Work has helpers while one thread takes long for it, which is tried now and then."""

from gpu_manager.emulated.cpu_arithmetic import LONG_S, WorkLength


def ways(length: WorkLength, alone_s: float, helped_s: float, calls: int) -> str:
    """How calls that take so long were done: with helpers, or alone."""
    found = ""
    for _ in range(calls):
        helped = length.is_long
        length.note(helped_s if helped else alone_s, helped=helped)
        found += "h" if helped else "a"
    return found


def test_short_work_is_done_alone_after_a_first_call() -> None:
    assert ways(WorkLength(), LONG_S / 2, LONG_S / 2, 5) == "haaaa"


def test_work_that_is_long_even_with_helpers_is_never_done_alone() -> None:
    assert ways(WorkLength(), 10 * LONG_S, 2 * LONG_S, 500) == 500 * "h"


def test_work_that_is_long_for_one_thread_has_helpers_but_for_rare_trials() -> None:
    found = ways(WorkLength(), 4 * LONG_S, LONG_S / 2, 500)
    assert found.startswith("ha" + 64 * "h" + "ah")
    assert found.count("a") == 8


def test_a_call_that_something_held_up_changes_nothing() -> None:
    length = WorkLength()
    ways(length, LONG_S / 2, LONG_S / 2, 5)
    length.note(100 * LONG_S, helped=False)
    assert ways(length, LONG_S / 2, LONG_S / 2, 5) == "aaaaa"


def test_the_way_follows_the_work() -> None:
    length = WorkLength()
    ways(length, LONG_S / 2, LONG_S / 2, 5)
    assert ways(length, 3 * LONG_S, 2 * LONG_S, 30).endswith("hhh")
    assert ways(length, LONG_S / 4, LONG_S / 2, 1000).endswith("aaa")
