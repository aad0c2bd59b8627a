"""Logs of functions: stored, bounded, filtered, followed, closed."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from gateway_ext.model import FunctionId, LogLine
from gateway_ext.ports import LogQuery
from gateway_ext.providers.managed.logs import FunctionLog
from tests.kit.waiting import eventually

F = FunctionId("openfaas-fn", "f")


def log_in(folder: Path, limit_bytes: int = 1 << 20) -> FunctionLog:
    return FunctionLog(F, folder, limit_bytes)


async def texts(lines: AsyncIterator[LogLine]) -> list[str]:
    return [line.text async for line in lines]


async def read(log: FunctionLog, query: LogQuery) -> list[str]:
    return await texts(log.read(query))


async def test_lines_are_kept_for_the_next_gateway(tmp_path: Path) -> None:
    first = log_in(tmp_path)
    first.write("a", "one", "é")
    first.close()
    second = log_in(tmp_path)
    second.write("b", "three")
    assert (await read(second, LogQuery(F))) == ["one", "é", "three"]
    assert second.last_line("a") == "é"
    second.close()


async def test_line_that_names_a_path_which_is_no_text_is_stored_all_the_same(
    tmp_path: Path,
) -> None:
    log = log_in(tmp_path)
    log.write("a", "no such file: \udcff")
    assert (await read(log, LogQuery(F))) == ["no such file: ?"]
    log.close()


async def test_lines_are_filtered_by_instance_tail_and_time(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    log.write("a", "one", "two")
    log.write("b", "three")
    assert (await read(log, LogQuery(F, instance="a"))) == ["one", "two"]
    assert (await read(log, LogQuery(F, tail=2))) == ["two", "three"]
    assert (await read(log, LogQuery(F, tail=0))) == []
    later = datetime.now(UTC) + timedelta(seconds=1)
    assert (await read(log, LogQuery(F, since=later))) == []
    assert len(await read(log, LogQuery(F, since=later - timedelta(minutes=1)))) == 3
    log.close()


async def test_oldest_lines_go_when_there_are_too_many(tmp_path: Path) -> None:
    log = log_in(tmp_path, limit_bytes=20_000)
    for number in range(2000):
        log.write("a", f"{number:06}")
    kept = await read(log, LogQuery(F))
    assert kept[-1] == "001999"
    assert kept == [f"{number:06}" for number in range(2000 - len(kept), 2000)]
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 21_000
    log.close()


async def test_torn_line_is_passed_over(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    log.write("a", "whole")
    log.close()
    with (tmp_path / "log.ndjson").open("ab") as file:
        file.write(b'["2026-01-01T00:00:00+00:00", "a", "to')
    log = log_in(tmp_path)
    assert (await read(log, LogQuery(F))) == ["whole"]
    log.close()


async def test_line_is_dropped_when_the_log_is_closed(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    log.write("a", "before")
    log.close()
    log.write("a", "after")
    assert (await read(log, LogQuery(F))) == ["before"]


@pytest.mark.parametrize("tail", [None, 0])
async def test_follower_receives_new_lines_until_the_log_closes(
    tmp_path: Path, tail: int | None
) -> None:
    log = log_in(tmp_path)
    log.write("a", "before")
    received: list[str] = []

    async def follow() -> None:
        async for line in log.read(LogQuery(F, tail=tail, follow=True)):
            received.append(line.text)  # noqa: PERF401 - read while it grows

    following = asyncio.create_task(follow())
    await asyncio.sleep(0)  # the task runs until it waits, and follows by then
    log.write("a", "one")
    log.write("a", "two")
    await eventually(lambda: "two" in received, "the second line")
    log.close()
    await following
    assert received == (["before"] if tail is None else []) + ["one", "two"]


def test_full_disk_costs_lines_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "f"
    folder.mkdir()
    (folder / "log.ndjson").symlink_to("/dev/full")
    log = log_in(folder)
    for number in range(3):
        log.write("a", f"{number}")
    assert caplog.text.count("No space left") == 1
    log.close()
