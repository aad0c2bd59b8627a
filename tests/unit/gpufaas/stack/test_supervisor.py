"""What `gpufaas up` keeps and runs."""

import asyncio
import fcntl
import logging
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpufaas import stack_folder as stack_folder_module
from gpufaas.cli import main
from gpufaas.errors import AlreadyUp, StackFailed
from gpufaas.stack.supervisor import Supervisor
from gpufaas.stack_folder import RunningStack, StackFolder, stack_folder
from tests.kit.waiting import eventually
from tests.unit.gpufaas.stack.toy_parts import alive, never, noting, part, pids

LOG = logging.getLogger(__name__)
RUNNING = RunningStack(1234, "http://127.0.0.1:8080", "http://127.0.0.1:7700", "unix:/x")


def test_folder_names_its_process_while_it_is_held(tmp_path: Path) -> None:
    folder = StackFolder(tmp_path)
    assert folder.running() is None
    with folder.held():
        assert folder.running() is None  # it has recorded nothing yet
        folder.record(RUNNING)
        assert folder.running() == RUNNING
    assert folder.running() is None


def test_folder_is_held_once(tmp_path: Path) -> None:
    folder = StackFolder(tmp_path)
    with folder.held():
        folder.record(RUNNING)
        with pytest.raises(AlreadyUp, match="1234"), folder.held():
            pass
    with folder.held(), pytest.raises(AlreadyUp, match=f"process {os.getpid()} "), folder.held():
        pass  # the first is still starting
    with folder.held():
        pass


def test_folder_is_held_though_somebody_just_looks_whether_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looking = os.open(tmp_path / "lock", os.O_CREAT | os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)  # as `running` does
    waits = SimpleNamespace(sleep=lambda _: os.close(looking))
    monkeypatch.setattr(stack_folder_module, "time", waits)
    with StackFolder(tmp_path).held():
        pass


def test_folder_of_a_killed_holder_runs_nothing(tmp_path: Path) -> None:
    folder = StackFolder(tmp_path)
    with folder.held():
        folder.record(RUNNING)
        record = (tmp_path / "stack.json").read_text()
    (tmp_path / "stack.json").write_text(record)  # it was not removed
    assert folder.running() is None
    assert folder.holder() is None


def test_folder_is_the_named_one_then_that_of_the_environment(tmp_path: Path) -> None:
    environment = {"GPUFAAS_STATE": str(tmp_path / "b")}
    assert stack_folder(str(tmp_path / "a"), environment).root == tmp_path / "a"
    assert stack_folder(None, environment).root == tmp_path / "b"


def test_node_address_is_abstract_when_the_path_is_too_long_for_a_socket() -> None:
    assert StackFolder(Path("/s")).node_address == "unix:/s/node/node.sock"
    long = StackFolder(Path("/") / ("x" * 120)).node_address
    assert long.startswith("unix:@gpufaas-")
    assert long != StackFolder(Path("/") / ("y" * 120)).node_address


def test_down_reports_it_when_nothing_is_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["down", "--state", str(tmp_path / "none")]) == 0
    assert "nothing is up" in capsys.readouterr().out


def test_down_ends_a_stack_that_is_starting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    holds = "import sys; from pathlib import Path; from gpufaas.stack_folder import *\n"
    holds += "with StackFolder(Path(sys.argv[1])).held(): print('held', flush=True); input()"
    command = [sys.executable, "-c", holds, str(tmp_path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as starting:
        assert starting.stdout is not None
        assert starting.stdout.readline() == b"held\n"
        assert main(["down", "--state", str(tmp_path)]) == 0
        assert starting.wait() == -signal.SIGTERM
    assert f"stopping process {starting.pid} of {tmp_path}" in capsys.readouterr().err
    assert StackFolder(tmp_path).holder() is None


async def test_child_is_started_again_when_it_dies_and_gone_at_the_end(tmp_path: Path) -> None:
    async with Supervisor(LOG) as children:
        await children.start(part(tmp_path, noting(tmp_path, "time.sleep(60)")))
        await eventually(lambda: len(pids(tmp_path)) == 1)
        os.kill(pids(tmp_path)[0], signal.SIGKILL)
        await eventually(lambda: len(pids(tmp_path)) == 2)
        assert alive(pids(tmp_path)[1])
    assert not any(alive(pid) for pid in pids(tmp_path))


async def test_child_is_started_again_by_another_command_when_it_has_one(tmp_path: Path) -> None:
    first = part(tmp_path, noting(tmp_path, "time.sleep(60)"))
    words = noting(tmp_path, f"open({str(tmp_path / 'again')!r}, 'w'); time.sleep(60)")
    again = (sys.executable, "-c", words)
    async with Supervisor(LOG) as children:
        await children.start(replace(first, command_again=again))
        await eventually(lambda: len(pids(tmp_path)) == 1)
        assert not (tmp_path / "again").exists()
        for life in (1, 2):
            os.kill(pids(tmp_path)[-1], signal.SIGKILL)
            await eventually(lambda: len(pids(tmp_path)) == life + 1)  # noqa: B023 - it ends in this round
            await eventually((tmp_path / "again").exists)
            (tmp_path / "again").unlink()


async def test_child_is_gone_when_the_stack_ends_as_soon_as_it_is_up(tmp_path: Path) -> None:
    async def once_noted() -> bool:
        return bool(pids(tmp_path))

    async with Supervisor(LOG) as children:
        await children.start(part(tmp_path, noting(tmp_path, "time.sleep(60)"), once_noted))
    assert not any(alive(pid) for pid in pids(tmp_path))


async def test_child_that_ends_before_it_is_up_fails_the_start_with_its_last_words(
    tmp_path: Path,
) -> None:
    async with Supervisor(LOG) as children:
        with pytest.raises(StackFailed, match=r"(?s)status 3.*no luck"):
            await children.start(part(tmp_path, "print('no luck'); raise SystemExit(3)", never))


async def test_child_that_ends_fails_the_start_though_another_program_answers_for_it(
    tmp_path: Path,
) -> None:
    before = set(threading.enumerate())

    async def answers_then() -> bool:
        await eventually(lambda: bool(pids(tmp_path)), "it has begun")
        await eventually(lambda: not alive(pids(tmp_path)[0]), "its status was read")
        new = set(threading.enumerate()) - before
        waiting = [each for each in new if each.name.startswith("asyncio-waitpid")]
        await eventually(lambda: not any(each.is_alive() for each in waiting), "the loop is told")
        await asyncio.sleep(0.05)  # what it was told is handled
        return True

    program = noting(tmp_path, "raise SystemExit(3)")
    async with Supervisor(LOG) as children:
        with pytest.raises(StackFailed, match="status 3"):
            await children.start(part(tmp_path, program, answers_then))


async def test_child_that_is_never_ready_fails_the_start_and_is_gone(tmp_path: Path) -> None:
    async with Supervisor(LOG) as children:
        late = part(tmp_path, noting(tmp_path, "time.sleep(60)"), never, start_s=0.7)
        with pytest.raises(StackFailed, match="not ready"):
            await children.start(late)
    assert not any(alive(pid) for pid in pids(tmp_path))


async def test_child_that_ignores_the_request_to_end_is_killed(tmp_path: Path) -> None:
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"

    async with Supervisor(LOG) as children:
        program = deaf + noting(tmp_path, "time.sleep(60)")
        await children.start(part(tmp_path, program, stop_s=0.2))
        await eventually(lambda: bool(pids(tmp_path)))
    assert not any(alive(pid) for pid in pids(tmp_path))
