"""The search finds what is planted: an error behind two bytes, a hang, memory, a lost value."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hunt.parsers.input_search import InputSearch
from hunt.parsers.input_trees import read, written
from hunt.parsers.kept_inputs import fewest
from hunt.parsers.parser_target import InputForm, Target, fault_of, fault_of_memory
from hunt.parsers.watched_searches import SearchPlan, searched

_FOLDERS = ("hunt/parsers",)
# A tenth is enough for a search that follows its steps.
_MOST_TRIES = 150_000


def planted(parse: Callable[[bytes], Any], **contract: Any) -> Target:
    """A target over a faulty parser."""
    fields: dict[str, Any] = {"refusals": (ValueError,), "seeds": lambda: [b"begin"]} | contract
    return Target(
        "planted", parse, form=InputForm.BINARY, reads=(), sender="nobody", bound="none", **fields
    )


def nested(data: bytes) -> int:
    """Fails only behind two right bytes, which chance alone hardly finds together."""
    if data[:1] == b"\x91":
        if data[1:2] == b"\xe3":
            raise KeyError("planted")
        return 1
    return 0


def test_search_finds_an_error_behind_steps_that_lead_to_it() -> None:
    search = InputSearch(planted(nested), [], _FOLDERS, seed=1)
    while not search.report.faults and search.report.tried < _MOST_TRIES:
        search.run(0.05)

    faults = search.report.faults
    assert [what for what, _ in faults.values()] == ["KeyError: 'planted'"]
    assert all(data.startswith(b"\x91\xe3") for _, data in faults.values())


def test_kept_inputs_reach_what_all_of_them_do() -> None:
    inputs = [b"\x91" + bytes([number]) for number in range(20)]

    assert fewest(planted(nested), inputs, _FOLDERS) == [b"\x91\x00"]


@pytest.mark.parametrize("error", [KeyError("x"), RecursionError("x"), MemoryError()])
def test_error_that_is_no_refusal_is_a_fault(error: Exception) -> None:
    def parse(_: bytes) -> None:
        raise error

    fault = fault_of(planted(parse), b"")

    assert fault is not None
    assert fault.what.startswith(type(error).__name__)


def test_refusal_is_no_fault() -> None:
    assert fault_of(planted(int), b"x") is None


def test_value_that_comes_back_as_another_is_a_fault() -> None:
    target = planted(int, encode=lambda number: str(abs(number)).encode())

    assert fault_of(target, b"3") is None
    assert fault_of(target, b"-3") is not None


def test_memory_beyond_the_bound_is_a_fault() -> None:
    # More than other threads of this process may take meanwhile, whose memory is counted too.
    target = planted(lambda data: bytes(10_000 * len(data)), memory_bytes=200_000)

    assert fault_of_memory(target, b"") is None
    assert fault_of_memory(target, b"a" * 100) is not None


def hang(data: bytes) -> None:
    """Never ends for one seed."""
    while data == b"hang":
        time.sleep(0.01)


def test_hang_is_ended_and_names_its_input(tmp_path: Path) -> None:
    target = planted(hang, seeds=lambda: [b"hang"])
    # Longer than a slow machine takes to start the search, which then hangs at its first input.
    plan = SearchPlan(seconds=60.0, seed=0, hang_s=10.0, folders=_FOLDERS)

    ((_, report),) = searched([(target, [])], plan, 1, tmp_path)

    assert [data for _, data in report.faults.values()] == [b"hang"]


def test_report_of_a_search_comes_back_from_its_process(tmp_path: Path) -> None:
    target = planted(nested, seeds=lambda: [b"\x91\xe3"])
    plan = SearchPlan(seconds=0.2, seed=0, hang_s=30.0, folders=_FOLDERS)

    ((_, report),) = searched([(target, [])], plan, 1, tmp_path)

    assert report.tried > 1
    assert report.arcs
    assert [what for what, _ in report.faults.values()] == ["KeyError: 'planted'"]


@pytest.mark.parametrize("form", [InputForm.JSON, InputForm.MSGPACK])
def test_tree_is_written_whole_or_up_to_a_bound(form: InputForm) -> None:
    tree = {"a": [1, {"b": [None, True, "ä", 1.5]}, []], "c": {}}
    whole = written(form, [tree])
    assert read(form, whole) == ([tree], b"")
    assert [written(form, [tree], most) for most in range(len(whole) + 2)] == [
        whole[:most] for most in range(len(whole) + 2)
    ]


@pytest.mark.parametrize("form", [InputForm.JSON, InputForm.MSGPACK])
def test_tree_that_is_larger_than_memory_is_written_up_to_its_bound(form: InputForm) -> None:
    """Repeating a list that is in a list repeats references: what they stand for grows faster."""
    tree: list[object] = []
    for _ in range(12):
        tree = [tree] * 1000
    assert len(written(form, [tree], 10_000)) == 10_000
