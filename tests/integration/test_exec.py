"""`gpufaas exec`: the program's output, exit code and signals are its own, and nothing is left."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.kit.nodes.worker_client import alive
from tests.kit.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.group("exec", seconds=30)

EXEC = [sys.executable, "-m", "gpufaas", "exec", "--devices", "cpu:1", "--gpu-memory", "400MiB"]

# Says which signals come; exits with status 5 when asked to. A handler that prints would fail where
# the next signal comes before its print has returned.
LISTENER = """
import os, signal, sys, time
def say(text):
    os.write(1, f"{text}\\n".encode())
def came(number, _):
    say(signal.Signals(number).name)
    if number == signal.SIGTERM:
        sys.exit(5)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(number, came)
say(os.getpid())
while True:
    time.sleep(0.01)
"""

MODEL = """
import torch
torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
model = model.to(device).eval()
with torch.no_grad():
    for size in (1, 4):
        answer = model(torch.arange(8.0 * size).reshape(size, 8).to(device))
        print(device, [round(value, 4) for value in answer.flatten().tolist()])
"""


def run(*arguments: str, stdin: str = "", code: int = 0) -> subprocess.CompletedProcess[str]:
    """What a finished run said."""
    done = subprocess.run(
        [*EXEC, *arguments], input=stdin, capture_output=True, text=True, timeout=270.0, check=False
    )
    assert done.returncode == code, done.stderr
    return done


def python(source: str) -> list[str]:
    return ["--", sys.executable, "-c", source]


@contextmanager
def running(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A run, in a process group of its own."""
    with subprocess.Popen(
        [*EXEC, *arguments], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_output_and_input_are_the_programs_own() -> None:
    source = "import sys; print(sys.stdin.read().upper()); print('aside', file=sys.stderr)"

    done = run(*python(source), stdin="hello")

    assert done.stdout == "HELLO\n"
    assert done.stderr == "aside\n"


@pytest.mark.parametrize("code", [0, 1, 77])
def test_exit_code_is_the_programs_own(code: int) -> None:
    run(*python(f"raise SystemExit({code})"), code=code)


def test_exit_code_says_which_signal_ended_the_program() -> None:
    run(*python("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"), code=128 + 11)


def test_exit_code_is_that_of_a_shell_when_there_is_no_such_program(tmp_path: Path) -> None:
    assert "not found" in run("--", "no-such-program", code=127).stderr
    (tmp_path / "text").touch()
    assert "Permission denied" in run("--", str(tmp_path / "text"), code=126).stderr


def test_program_that_is_missing_is_asked_for() -> None:
    assert run(code=2).stderr == (
        "gpufaas exec: which program? use gpufaas exec -- python your_script.py\n"
    )


def test_arguments_of_the_program_are_not_ours() -> None:
    program = [*python("import sys; print(sys.argv[1:])"), "--stats", "--devices", "-h", "--"]

    assert run(*program).stdout == "['--stats', '--devices', '-h', '--']\n"


def test_python_path_of_the_user_stays() -> None:
    environment = os.environ | {"PYTHONPATH": "/elsewhere"}  # noqa: TID251 - for a child
    source = "import sys; print('/elsewhere' in sys.path)"

    done = subprocess.run(
        [*EXEC, *python(source)], env=environment, capture_output=True, text=True, check=True
    )

    assert done.stdout == "True\n"


def test_program_sees_no_gpu_of_the_machine_when_its_caller_chose_one() -> None:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "1"}  # noqa: TID251 - for a child
    source = "import os; print(repr(os.environ['CUDA_VISIBLE_DEVICES']))"

    done = subprocess.run(
        [*EXEC, *python(source)], env=environment, capture_output=True, text=True, check=True
    )

    assert done.stdout == "''\n"


def test_signals_reach_the_program_once_each() -> None:
    with running(*python(LISTENER)) as it:
        line(it)
        for number in (signal.SIGUSR1, signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            it.send_signal(number)
            assert line(it) == number.name
        assert it.stdout is not None
        assert it.stdout.read() == ""
        assert it.wait(PATIENCE_S) == 5


def test_interrupt_comes_once_when_a_terminal_sends_it() -> None:
    child, terminal = pty.fork()
    if not child:
        os.execv(sys.executable, [*EXEC, *python(LISTENER)])
    with os.fdopen(terminal, "rb", buffering=0) as output:
        said = _read_until(output, b"\r\n")
        program = int(said.split()[0])
        os.write(terminal, b"\x03")
        said = _read_until(output, b"SIGINT\r\n")
        time.sleep(0.3)
        os.kill(program, signal.SIGTERM)
        said += _read_until(output, b"SIGTERM\r\n")
        _, status = os.waitpid(child, 0)
    assert said.count(b"SIGINT") == 1
    assert os.waitstatus_to_exitcode(status) == 5


def test_nothing_is_left_when_the_run_is_killed() -> None:
    with running(*python(LISTENER)) as it:
        program = int(line(it))
        wait_until(lambda: len(_fork_servers(it.pid)) == 1, "it has a server of forks")
        (server,) = _fork_servers(it.pid)
        wait_until(lambda: bool(_fork_servers(server)), "it has a spare worker")
        workers = _children(server)

        it.kill()

        wait_until(
            lambda: not any(alive(pid) for pid in [server, *workers]),
            "all have ended",
        )
        os.kill(program, signal.SIGKILL)


def test_model_runs_on_the_gpu_and_the_statistics_say_so() -> None:
    alone = subprocess.run(
        [sys.executable, "-c", MODEL], capture_output=True, text=True, check=True
    )

    done = run("--stats", *python(MODEL))

    assert done.stdout == alone.stdout.replace("cpu", "cuda")
    found = json.loads(done.stderr.splitlines()[-1])
    assert found["graph_calls"] == 2
    assert found["local_calls"] == {}
    assert found["processes"] == 1
    assert (found["loads"], found["hits"], found["evictions"]) == (1, 0, 0)
    assert found["graph_operators"] >= 6
    assert found["bytes_in"] >= (1 + 4) * 8 * 4
    assert found["bytes_out"] >= (1 + 4) * 2 * 4


def test_statistics_are_one_line_of_json_when_the_program_used_no_gpu() -> None:
    done = run("--stats", *python("print('hello')"))

    assert done.stdout == "hello\n"
    (said,) = done.stderr.splitlines()
    assert json.loads(said)["graph_calls"] == 0


def _read_until(output: object, end: bytes) -> bytes:
    """What a terminal shows, up to these bytes."""
    said = b""
    while end not in said:
        said += output.read(1)  # type: ignore[attr-defined]  # a raw file
    return said


def _fork_servers(parent: int) -> list[int]:
    """Fork servers, and workers, which are copies of one."""
    return [pid for pid in _children(parent) if b"gpu_manager.worker" in _command(pid)]


def _command(pid: int) -> bytes:
    """Nothing where the process has ended since it was listed."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def _children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    return [int(child) for child in text.split()]
