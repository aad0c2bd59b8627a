"""Numbers in texts of others: what every reader of ours takes, and what none of them takes."""

import json
import math
import os
from collections.abc import Callable
from typing import Any

import pytest

from cache_manager import exits
from common.addresses import host_and_port
from common.errors import BadSize
from common.numerals import natural, number, parse_size, whole
from gateway_ext.calls import passed_headers
from gateway_ext.openfaas import quantities, wire
from gateway_ext.workflows import conditions
from gpufaas.commands import bill
from gpufaas.options import configuration, gpu_node
from scheduler.sim import workload

# Python's `int` or `float` takes each of them, or would if it were read so.
_HOSTILE = (
    "٣",
    "1_000",
    "\N{FULLWIDTH DIGIT ONE}",
    "nan",
    "inf",
    "Infinity",
    "1e999",
    "²",
    "+1",
    "0x1",
    "1\n",
    "1\0",
)
READERS: dict[str, Callable[[str], Any]] = {
    "whole": whole,
    "number": number,
    "size": lambda text: parse_size(text.replace("\n", "\0")),  # blanks around it are usual
    "size with a unit": lambda text: parse_size(f"{text}KiB"),
    "port": lambda text: host_and_port(f"127.0.0.1:{text}"),
    "duration": lambda text: quantities.seconds(text.replace("\n", "\0")),
    "memory": lambda text: quantities.memory_bytes(text.replace("\n", "\0")),
    "processors": lambda text: quantities.cpus(text.replace("\n", "\0")),
    "exit rule": lambda text: exits.make(f"fixed:{text}"),
    "weight": lambda text: annotated("com.gpufaas.weight", text),
    "leases": lambda text: annotated("com.gpufaas.leases", text),
    "priority": lambda text: annotated("com.gpufaas.priority", text),
    "share": lambda text: annotated("com.gpufaas.share", f"{text}%"),
    "target": lambda text: labelled("com.openfaas.scale.target", text),
    "most replicas": lambda text: labelled("com.openfaas.scale.max", text),
    "since": lambda text: bill.seconds_ago(f"{text}h"),
    "slots": lambda text: gpu_node.number_of("gpu_slots", text),
    "spare": lambda text: gpu_node.number_of("spare_contexts", text),
    "emulated": lambda text: gpu_node.emulation(text, "0"),
    "natural": lambda text: required(natural(text)),
    "retry after": lambda text: required(
        passed_headers.asked_wait_s([(b"retry-after", text.replace("\n", "\0").encode())], 0.0)
    ),
    "invocations": lambda text: workload.parse(TRACE + text.replace("\n", "x"), "t"),
    "setting, whole": lambda text: setting("GPUFAAS_SCHEDULER_MAX_WAITING", text),
    "setting": lambda text: setting("GPUFAAS_TRACING_RATIO", text),
}


TRACE = "HashOwner,HashApp,HashFunction,Trigger,1\no,a,f,http,"


def required(found: float | None) -> float:
    if not found:
        raise ValueError("no number")
    return found


def annotated(name: str, text: str) -> None:
    """Blanks around an annotation's value are usual."""
    deployed({"annotations": {name: text.replace("\n", "\0")}})


def labelled(name: str, text: str) -> None:
    deployed({"labels": {name: text.replace("\n", "\0")}})


def deployed(more: dict[str, object]) -> None:
    wire.deployment(json.dumps({"service": "f", "image": "i"} | more).encode())


def setting(name: str, text: str) -> None:
    configuration.read_settings(os.devnull, {name: text}, {})


@pytest.mark.parametrize("name", READERS)
def test_no_reader_takes_what_is_a_number_for_python_alone(name: str) -> None:
    taken = []
    for text in _HOSTILE:
        try:
            taken.append((text, READERS[name](text)))
        except Exception:  # noqa: BLE001 - each has an error of its own, with its own test
            continue
    assert taken == []


@pytest.mark.parametrize("name", READERS)
def test_every_reader_takes_an_ordinary_number(name: str) -> None:
    READERS[name]("1")


def test_numbers_are_read_as_written() -> None:
    assert [whole(text) for text in ("0", "-7", "007", "9" * 18)] == [0, -7, 7, 10**18 - 1]
    assert [number(text) for text in ("0", "-7.", ".5", "1.5e-3", "1E3")] == [
        0,
        -7,
        0.5,
        1.5e-3,
        1e3,
    ]
    for text in ("", "-", ".", "1.2.3", "e3", "1e", "9" * 19):
        with pytest.raises(ValueError, match="is no whole number"):
            whole(text)
    for text in ("", "-", ".", "1.2.3", "e3", "1e", "9" * 5_000):
        with pytest.raises(ValueError, match="is no number"):
            number(text)
    assert math.isfinite(number("9" * 64))


def test_condition_reads_ascii_digits_alone() -> None:
    for text in ("a.status == ٣", "a.json[٣] == 1", "a.status == 1_0"):
        with pytest.raises(conditions.BadCondition):
            conditions.condition(text, ["a"])
    conditions.condition("a.status == 3 and a.json[3] == 1", ["a"])


def test_size_has_ascii_units() -> None:
    with pytest.raises(BadSize):
        parse_size("1\N{KELVIN SIGN}iB")
