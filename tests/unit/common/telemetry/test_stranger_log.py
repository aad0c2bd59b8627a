"""What strangers do is logged, and fills no log."""

import asyncio
import logging

import pytest

from common.telemetry.stranger_log import StrangerLog
from tests.kit.virtual_time import virtually


@pytest.fixture
def strangers() -> StrangerLog:
    return StrangerLog(logging.getLogger("strangers"))


@virtually
async def test_strangers_get_one_warning_a_minute_with_how_many_were_left_out(
    caplog: pytest.LogCaptureFixture, strangers: StrangerLog
) -> None:
    caplog.set_level(logging.WARNING)
    for _ in range(1_000):
        strangers.warn("rejected %s", "a client")
    await asyncio.sleep(61)
    strangers.warn("rejected %s", "100 %s")
    assert [record.getMessage() for record in caplog.records] == [
        "rejected a client",
        "rejected 100 %s (999 lines like this one were left out)",
    ]


@virtually
async def test_lines_that_are_written_as_debug_are_not_counted_as_left_out(
    caplog: pytest.LogCaptureFixture, strangers: StrangerLog
) -> None:
    caplog.set_level(logging.DEBUG)
    for _ in range(3):
        strangers.warn("rejected")
    await asyncio.sleep(61)
    strangers.warn("rejected")
    found = [(one.levelname, one.getMessage()) for one in caplog.records if one.name == "strangers"]
    levels = ("WARNING", "DEBUG", "DEBUG", "WARNING")
    assert found == [(level, "rejected") for level in levels]


@virtually
async def test_each_cause_has_a_line_a_minute_of_its_level(
    caplog: pytest.LogCaptureFixture, strangers: StrangerLog
) -> None:
    caplog.set_level(logging.INFO)
    for number in range(1_000):
        strangers.log(logging.INFO, "away", "call %d: nobody is there", number)
        strangers.log(logging.WARNING, "broken", "call %d: it is broken", number)
    await asyncio.sleep(61)
    strangers.log(logging.INFO, "away", "call %d: nobody is there", 1_000)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "call 0: nobody is there"),
        ("WARNING", "call 0: it is broken"),
        ("INFO", "call 1000: nobody is there (999 lines like this one were left out)"),
    ]


@virtually
async def test_causes_are_forgotten_when_there_are_too_many(
    caplog: pytest.LogCaptureFixture, strangers: StrangerLog
) -> None:
    caplog.set_level(logging.WARNING)
    for cause in ("kept", "forgotten", *map(str, range(998)), "kept", "1000", "kept", "forgotten"):
        strangers.log(logging.WARNING, cause, "%s", cause)
    assert caplog.messages.count("kept") == 1
    assert caplog.messages.count("forgotten") == 2
