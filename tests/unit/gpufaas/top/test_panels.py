"""`gpufaas top` at a pseudo-terminal: keys, sizes, colours, and what remains at the end."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from gpufaas.stack.held_ports import HeldPort
from tests.kit.page.generated_cluster import GeneratedCluster
from tests.kit.page.page_world import PASSWORD, USER
from tests.kit.page.served_page import served
from tests.kit.waiting import PATIENCE_S

COMMAND = [sys.executable, "-m", "gpufaas", "top"]
ENTERED, LEFT = b"\x1b[?1049h", b"\x1b[?1049l"


@pytest.fixture(name="secrets")
def _secrets(tmp_path: Path) -> Path:
    (tmp_path / "basic-auth-user").write_text(USER)
    (tmp_path / "basic-auth-password").write_text(PASSWORD)
    return tmp_path


@pytest.fixture(name="cluster")
def _cluster() -> GeneratedCluster:
    return GeneratedCluster(6, 9)


@pytest.fixture(name="url")
def _url(cluster: GeneratedCluster) -> Iterator[str]:
    with served(cluster) as url:
        yield url.removesuffix("/ui/")


def options(url: str, secrets: Path) -> list[str]:
    return ["--gateway", url, "--secrets-dir", str(secrets)]


def environment(secrets: Path, **more: str) -> dict[str, str]:
    """The environment of a user with a home and no settings."""
    return {"HOME": str(secrets), "TERM": "xterm-256color", **more}


class Screen:
    """A terminal of ours, and what was written to it."""

    def __init__(self, process: "subprocess.Popen[bytes]", end: int) -> None:
        self.process = process
        self._end = end
        self.written = b""

    def press(self, keys: str) -> None:
        os.write(self._end, keys.encode())

    def resize(self, width: int, height: int) -> None:
        fcntl.ioctl(self._end, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def shows(self, text: str) -> str:
        """The first whole frame from now on that has this."""
        begun = len(self.written)
        until_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < until_s:
            self._read(0.1)
            for part in reversed(self.written[begun:].split(b"\x1b[H")[1:]):
                shown = re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", part).decode(errors="replace")
                if part.rstrip(LEFT).endswith(b"\x1b[J") and text in shown:
                    return shown
        raise AssertionError(f"{text!r} is not shown, but {self.written[-3000:]!r}")

    def ended(self) -> int:
        """How it ended; everything that it wrote has been read."""
        until_s = time.monotonic() + PATIENCE_S
        while self.process.poll() is None and time.monotonic() < until_s:
            self._read(0.1)
        status = self.process.wait()
        while self._read(0.2):  # a terminal gives a few KiB at a time
            pass
        return status

    def _read(self, within_s: float) -> bool:
        ready, _, _ = select.select([self._end], [], [], within_s)
        if ready:
            self.written += os.read(self._end, 1 << 16)
        return bool(ready)


@contextmanager
def screen(url: str, secrets: Path, **more: str) -> Iterator[Screen]:
    """The command at a terminal of 140 columns and 30 lines."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 140, 0, 0))
    process = subprocess.Popen(
        [*COMMAND, *options(url, secrets)],
        stdin=theirs, stdout=theirs, stderr=theirs,
        env=environment(secrets, **more), start_new_session=True,
    )  # fmt: skip
    found = Screen(process, ours)
    try:
        yield found
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(theirs)


def test_top_shows_changes_until_q(url: str, secrets: Path) -> None:
    with screen(url, secrets) as found:
        frame = found.shows("policy lalbo3")
        assert "node-00/cuda:0" in frame
        found.press("2")
        found.shows("resnet.openfaas-fn")
        found.press("q")
        assert found.ended() == 0
        assert found.written.count(ENTERED) == found.written.count(LEFT) == 1
        assert found.written.index(ENTERED) < found.written.index(LEFT)
        assert b"Traceback" not in found.written


def test_top_is_live(url: str, secrets: Path, cluster: GeneratedCluster) -> None:
    with screen(url, secrets) as found:
        found.shows("policy lalbo3")
        cluster.policy = {"name": "netgain", "parameters": {"patience": 3}}
        found.shows("policy netgain patience=3")


def test_top_opens_what_is_selected_and_closes_it(url: str, secrets: Path) -> None:
    with screen(url, secrets) as found:
        found.shows("node-00/cuda:1")
        found.press("\x1b[B\r")
        frame = found.shows("LEASES")
        assert "node-00/cuda:1" in frame
        found.press("\x1b")
        found.shows("node-00/cuda:0")
        found.press("4\r")
        found.shows("configured for a batch of 2, with vCPUs: 3, slots: 2")
        found.shows("candidate")


def test_top_follows_the_size_of_its_terminal(url: str, secrets: Path) -> None:
    with screen(url, secrets) as found:
        found.shows("policy lalbo3")
        found.resize(50, 12)
        os.kill(found.process.pid, signal.SIGWINCH)
        frame = found.shows("node-00/cuda:0")
        while frame.count("\n") != 11:
            frame = found.shows("node-00/cuda:0")
        assert max(len(line.strip("\r")) for line in frame.split("\n")) <= 50


def test_top_has_no_colours_when_they_are_switched_off(url: str, secrets: Path) -> None:
    with screen(url, secrets, NO_COLOR="1") as found:
        found.shows("policy lalbo3")
        assert not re.search(rb"\x1b\[[0-9;]*m", found.written)
    with screen(url, secrets) as found:
        found.shows("policy lalbo3")
        assert re.search(rb"\x1b\[[0-9;]*m", found.written)


def test_top_leaves_the_terminal_as_it_was_when_it_is_asked_to_end(url: str, secrets: Path) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        with screen(url, secrets) as found:
            found.shows("policy lalbo3")
            os.kill(found.process.pid, number)
            assert found.ended() == 0
            assert found.written.rstrip().endswith(LEFT)


def test_top_reports_that_the_gateway_is_gone_and_continues_when_it_is_back(secrets: Path) -> None:
    cluster = GeneratedCluster(2, 3)
    with ExitStack() as stack:
        port = stack.enter_context(HeldPort())
        first = ExitStack()
        url = first.enter_context(served(cluster, port=port.number)).removesuffix("/ui/")
        stack.push(first)
        found = stack.enter_context(screen(url, secrets))
        found.shows("policy lalbo3")
        first.close()
        frame = found.shows("not fresh")
        assert "node-00/cuda:0" in frame  # as it was last
        cluster.policy = {"name": "lb", "parameters": {}}
        stack.enter_context(served(cluster, port=port.number))
        assert "not fresh" not in found.shows("policy lb")


def test_top_prints_once_for_a_pipe(url: str, secrets: Path) -> None:
    for more in ([], ["--once"]):
        done = subprocess.run(
            [*COMMAND, *options(url, secrets), *more],
            env=environment(secrets, COLUMNS="150"), capture_output=True, text=True,
            timeout=PATIENCE_S, check=True,
        )  # fmt: skip
        assert "node-00/cuda:0" in done.stdout
        assert "\x1b" not in done.stdout
        assert max(map(len, done.stdout.splitlines())) <= 150


def test_top_prints_json(url: str, secrets: Path) -> None:
    done = subprocess.run(
        [*COMMAND, *options(url, secrets), "--json"],
        env=environment(secrets), capture_output=True, text=True, timeout=PATIENCE_S, check=True,
    )  # fmt: skip
    assert len(json.loads(done.stdout)["gpus"]) == 6


def test_top_explains_in_a_line_why_it_cannot_run(url: str, secrets: Path, tmp_path: Path) -> None:
    (secrets / "basic-auth-password").write_text("wrong")
    for named, word in ((url, "login"), ("http://127.0.0.1:9", "no gateway answers")):
        done = subprocess.run(
            [*COMMAND, "--once", *options(named, secrets)],
            env=environment(tmp_path), capture_output=True, text=True, timeout=PATIENCE_S,
            check=False,
        )  # fmt: skip
        assert done.returncode == 2
        assert word in done.stderr
        assert len(done.stderr.splitlines()) == 1
