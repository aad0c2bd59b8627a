"""Logs that others append to stay bounded, and tell why a process failed."""

import asyncio
import errno
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpufaas.stack import log_files
from gpufaas.stack.log_files import keep_short, last_words, shorten
from tests.kit.waiting import eventually

_MOST = 10_000


def test_log_is_bounded_without_loss_while_its_writer_goes_on(tmp_path: Path) -> None:
    log, before = tmp_path / "part.log", tmp_path / "part.log.1"
    lines = [f"line {number:04} {'x' * 80}\n".encode() for number in range(1_500)]
    with log.open("ab", buffering=0) as writer:
        read = b""
        for line in lines:
            writer.write(line)
            shorten(log, _MOST)
            assert log.stat().st_size <= _MOST
            if before.exists():
                assert before.stat().st_size <= 2 * _MOST
                read += before.read_bytes()
                before.unlink()
    found = (read + log.read_bytes()).splitlines(keepends=True)
    assert [line for line in found if line.strip()] == lines


@pytest.mark.parametrize("takes_off", [True, False])
def test_logs_begin_and_end_with_whole_lines_when_they_are_shortened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, takes_off: bool
) -> None:
    log, before = tmp_path / "part.log", tmp_path / "part.log.1"

    def taken_off(_: int, size: int) -> bool:
        if takes_off:
            log.write_bytes(log.read_bytes()[size:])
        return takes_off

    monkeypatch.setattr(log_files, "_is_taken_off", taken_off)
    line = b"line %s\n" % (b"x" * 80)
    for _ in range(5):
        with log.open("ab") as writer:
            writer.write(line * 200)
        shorten(log, _MOST)
        for file in (log, before):
            assert {kept.strip() for kept in file.read_bytes().splitlines()} <= {line.strip(), b""}


def test_newest_lines_stay_when_a_log_grew_by_much_at_once(tmp_path: Path) -> None:
    log = tmp_path / "part.log"
    log.write_bytes(b"".join(b"line %05d\n" % number for number in range(50_000)))
    shorten(log, _MOST)
    kept = (tmp_path / "part.log.1").read_bytes() + log.read_bytes()
    assert log.stat().st_size <= _MOST
    assert len(kept) <= _MOST + len(b"line 49999\n")
    assert kept.startswith(b"line 4")
    assert kept.endswith(b"line 49999\n")


def test_newest_bytes_stay_when_a_log_that_grew_by_much_has_no_second_line(tmp_path: Path) -> None:
    log = tmp_path / "part.log"
    log.write_bytes(b"x" * 20 * _MOST + b"end")
    shorten(log, _MOST)
    kept = (tmp_path / "part.log.1").read_bytes() + log.read_bytes()
    assert log.stat().st_size <= _MOST
    assert _MOST // 2 < len(kept) <= _MOST
    assert kept.endswith(b"xend")


def test_both_logs_stay_when_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, before = tmp_path / "part.log", tmp_path / "part.log.1"
    log.write_bytes(b"x" * 2 * _MOST)
    before.write_bytes(b"older\n")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=_MOST))
    shorten(log, _MOST)
    assert (log.stat().st_size, before.read_bytes()) == (2 * _MOST, b"older\n")


def test_no_part_of_a_copy_is_left_when_the_disk_becomes_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(log_files, "_is_taken_off", lambda *_: False)
    monkeypatch.setattr(shutil, "copyfileobj", full)
    log = tmp_path / "part.log"
    log.write_bytes(b"x" * 2 * _MOST)
    shorten(log, _MOST)
    assert list(tmp_path.iterdir()) == [log]
    assert log.stat().st_size == 2 * _MOST


def test_short_or_missing_log_is_left_alone(tmp_path: Path) -> None:
    shorten(tmp_path / "none.log", _MOST)
    (tmp_path / "part.log").write_text("a\n")
    shorten(tmp_path / "part.log", _MOST)
    assert [path.name for path in tmp_path.iterdir()] == ["part.log"]


async def test_log_is_kept_short_until_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_files, "_LOOK_S", 0.01)
    monkeypatch.setattr(log_files, "MOST_LOG_BYTES", _MOST)
    log = tmp_path / "part.log"
    keeping = asyncio.create_task(keep_short(log))
    for _ in range(2):
        log.write_bytes(b"x" * _MOST + b"\n")
        await eventually(lambda: log.stat().st_size < _MOST, "it is short again")
    keeping.cancel()


def test_last_words_are_those_of_this_run(tmp_path: Path) -> None:
    log = tmp_path / "part.log"
    assert last_words(log, "scheduler", 0) == "scheduler logged nothing"
    log.write_text("an earlier error\n")
    since = log.stat().st_size
    assert last_words(log, "scheduler", since) == "scheduler logged nothing"
    with log.open("a") as file:
        file.write("".join(f"line {number}\n" for number in range(9)) + "x" * 9_999)
    words = last_words(log, "scheduler", since).splitlines()
    assert words[0] == f"the log of scheduler, {log}, ends with:"
    assert words[1:5] == ["line 5", "line 6", "line 7", "line 8"]
    assert len(words[5]) == 500


@pytest.mark.parametrize(
    "line", ["OSError: [Errno 28] No space left on device", '{"e":"no space left on device"}']
)
def test_full_disk_is_said_in_few_words(line: str, tmp_path: Path) -> None:
    (tmp_path / "part.log").write_text(f"{line}\nmore\n")
    words = last_words(tmp_path / "part.log", "etcd", 0)
    assert words == f"no space left on device in {tmp_path}"


def test_full_disk_of_long_ago_is_not_why_a_process_failed(tmp_path: Path) -> None:
    log = tmp_path / "part.log"
    log.write_text("no space left on device\n" + "more\n" * 4 + "bad secret\n")
    assert last_words(log, "gateway", 0).endswith("\nmore\nbad secret")
