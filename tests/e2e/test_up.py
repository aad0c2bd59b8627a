"""`gpufaas up` and `down`: what they tell, what comes back when killed, and what stays behind."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import httpx

from gpufaas.remote.http_request import NoAnswer
from gpufaas.stack_folder import StackFolder
from tests.kit.processes.stopped_process import stop
from tests.kit.stacks.handlers import GREETING, ON_GPU, PLAIN, write
from tests.kit.stacks.load import Asked, warm
from tests.kit.stacks.stack import PATIENCE_S, Rest, Stack, stack
from tests.kit.waiting import wait_until

PARTS = ("-m gpufaas gateway", "-m gpufaas gpu-manager", "-m gpufaas scheduler", "--data-dir")


def test_service_returns_when_any_part_is_killed(own: Stack) -> None:
    own.start("--policy", "lb")
    assert own.scheduler.get("/policy")["policy"] == "lb"
    rest = _with_functions(own)
    for words in PARTS:
        _lose(own, rest, words, signal.SIGKILL)
    wait_until(lambda: _placed(own, rest), "calls are placed again", instead=own.said)
    assert own.scheduler.get("/policy")["policy"] == "lb"
    began_s = time.monotonic()
    done = own.run("down", "--state", str(own.state))
    assert (done.returncode, done.stdout.strip()) == (0, "down"), done.stderr
    assert time.monotonic() - began_s < PATIENCE_S
    _nothing_is_left(own)


def test_service_returns_when_any_part_is_frozen(own: Stack) -> None:
    own.start()
    rest = _with_functions(own)
    for words in PARTS:
        _lose(own, rest, words, signal.SIGSTOP)
    assert own.output.read_text().count("was stopped by a signal") == len(PARTS)
    assert own.instances("greets")
    stop(own.instances("greets")[0])
    wait_until(lambda: _answers(rest, "greets"), "an answer of another instance", instead=own.said)
    assert own.run("down", "--state", str(own.state)).returncode == 0
    _nothing_is_left(own)


def test_functions_are_there_again_when_it_was_interrupted_and_started_anew(own: Stack) -> None:
    process = own.start()
    rest = Rest(own)
    rest.deploy("stays", annotations={**write(own.work, "stays", GREETING), **PLAIN})
    password = own.password
    os.killpg(process.pid, signal.SIGINT)  # Ctrl-C is for all that the terminal runs
    assert process.wait(PATIENCE_S) == 0
    _nothing_is_left(own)
    process = own.start()
    assert own.password == password
    rest.ready("stays")
    assert rest.call("stays", "you").text == "hello you"
    # And then the one that supervises everything is killed.
    assert own.instances("stays")
    process.kill()
    process.wait()
    _nothing_is_left(own)
    assert own.run("down", "--state", str(own.state)).stdout.startswith("nothing is up")


def test_second_one_is_told_which_process_is_up_already(up: Stack) -> None:
    first = StackFolder(up.state).running()
    assert first is not None
    process = up.launch()
    assert process.wait(PATIENCE_S) != 0
    said = up.output.read_text()
    assert f"process {first.pid}" in said.splitlines()[-1], said
    assert StackFolder(up.state).running() == first
    assert Rest(up).http.get("/healthz").status_code == httpx.codes.OK


def test_program_runs_on_the_stacks_gpus(up: Stack, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\n"
        "model = torch.nn.Linear(4, 2).cuda()\n"
        "with torch.no_grad():\n"
        "    for _ in range(3): model(torch.ones(1, 4).cuda()).cpu()\n"
    )
    here, program = {"GPUFAAS_STATE": str(up.state)}, ("--", sys.executable, str(script))
    ran = up.run("exec", "--stack", "--stats", *program, **here)
    assert ran.returncode == 0, ran.stderr
    counts = json.loads(ran.stderr.splitlines()[-1])
    assert counts["graph_calls"] == 3
    assert "loads" not in counts, "others load there, too"
    models = json.loads(up.run("models", "--json", **here).stdout)
    assert any("local/exec" in model["functions"] for model in models)
    checked = up.run("check", "--stack", str(script), **here)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    refused = up.run("exec", "--stack", "--devices", "cpu:3", *program, **here)
    assert refused.stderr == "gpufaas exec: --devices is no option of the stack's GPUs\n"
    nowhere = up.run("exec", "--stack", *program, GPUFAAS_STATE=str(tmp_path / "none"))
    assert "without --stack a program has GPUs of its own" in nowhere.stderr


def test_taken_port_is_told_with_the_remedy(up: Stack, environment: dict[str, str]) -> None:
    with stack(environment) as other:
        other.port = up.port
        process = other.launch()
        assert process.wait(PATIENCE_S) != 0
        said = other.output.read_text()
        assert f"127.0.0.1:{up.port} is not free for the gateway" in said
        assert "--port" in said
        assert not other.left()


def test_unknown_policy_is_told_with_those_that_there_are(own: Stack) -> None:
    process = own.launch("--policy", "guess")
    assert process.wait(PATIENCE_S) != 0
    assert "lalbo3" in own.output.read_text()
    assert not own.left()


def _nothing_is_left(own: Stack) -> None:
    """Wait for it: processes that were killed take a moment, however long that may be here."""
    wait_until(lambda: not own.left(), "nothing is left", instead=lambda: str(own.left()))


def _with_functions(own: Stack) -> Rest:
    """Deploy a function without and one with a GPU, and wait until both serve."""
    rest = Rest(own)
    rest.deploy("greets", annotations={**write(own.work, "greets", GREETING), **PLAIN})
    gpu = {"com.gpufaas.enabled": "true"}
    rest.deploy("computes", annotations={**write(own.work, "computes", ON_GPU), **gpu})
    warm(own, rest, Asked("computes"))
    return rest


def _lose(own: Stack, rest: Rest, words: str, fault: signal.Signals) -> None:
    """Kill or freeze a part, and wait until it is replaced and both functions answer."""
    before = own.part(words)
    assert before, words
    os.kill(before, fault)
    wait_until(lambda: own.part(words) not in {0, before}, f"{words} again", instead=own.said)
    for name in ("greets", "computes"):
        wait_until(lambda: _answers(rest, name), f"{name} after {words}", instead=own.said)  # noqa: B023 - it ends in this round


def _answers(rest: Rest, name: str) -> bool:
    try:
        return rest.call(name, "you").status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def _placed(own: Stack, rest: Rest) -> bool:
    try:
        before = own.scheduler.get("/cluster")
        _answers(rest, "computes")
        after = own.scheduler.get("/cluster")
    except NoAnswer:
        return False
    return int(after["hits"] + after["misses"]) > int(before["hits"] + before["misses"])
