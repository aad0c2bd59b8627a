"""Staged exit through real processes: a model answers from every stage that it has come to."""

import os
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from gpufaas.errors import CommandError
from gpufaas.remote.scheduler_api import request_story
from tests.kit.stacks import handlers
from tests.kit.stacks.load import Asked, warm
from tests.kit.stacks.stack import Rest, Stack, stack
from tests.kit.waiting import wait_until

# The last stage that each function's model comes to, and the rule that leaves it there.
_STAGES = {
    "context": "fixed:0.2,600,600,600",
    "host": "fixed:0.2,0,600,600",
    "disk": "fixed:0.2,0,0.2,600",
    "gone": "fixed:0.2,0,0.2,0.2",
}
_DISK_BYTES = 1 << 20
_QUICK = "fixed:0.25"
_GPU = {"com.gpufaas.enabled": "true"}


class Leaving(NamedTuple):
    """A stack whose models leave, and its gateway."""

    up: Stack
    rest: Rest


@pytest.fixture(scope="module")
def leaving(environment: Mapping[str, str]) -> Iterator[Leaving]:
    """A stack whose models never leave, with a function for each stage, which says otherwise.

    Its disk has room for small models alone, where the system lets us make one.
    """
    with stack(environment) as found, _small_disk(found.folder / "spill") as spill:
        found.start("--spill", str(spill))
        rest = Rest(found)
        for number, (stage, rule) in enumerate(_STAGES.items()):
            rest.deploy(stage, annotations=_of(found, stage, number, rule))
        yield Leaving(found, rest)


@contextmanager
def _small_disk(folder: Path) -> Iterator[Path]:
    """A file system of a mebibyte in this folder; a plain folder where none can be mounted."""
    folder.mkdir()
    size = f"size={_DISK_BYTES}"
    mount = ("mount", "-t", "tmpfs", "-o", size, "tmpfs", str(folder))
    is_mounted = not subprocess.run(mount, check=False, capture_output=True).returncode
    try:
        yield folder
    finally:
        if is_mounted:
            subprocess.run(("umount", "--lazy", str(folder)), check=True)


def _of(up: Stack, name: str, seed: int, rule: str, width: int = 256) -> dict[str, str]:
    """What deploys a function whose weights come of this seed, and leave by this rule.

    They are 276 bytes for each of `width`.
    """
    text = handlers.ON_GPU.replace("manual_seed(0)", f"manual_seed({seed})")
    text = text.replace("256", str(width))
    text = text.replace('"pid": os.getpid()', '"sum": round(float(answer().sum()), 4)')
    return dict(handlers.write(up.work, name, text)) | _GPU | {"com.gpufaas.exit": rule}


def _rests(up: Stack, model: str) -> dict[str, float | None]:
    """The stages of a model, and the seconds left in each."""
    (found,) = [one for one in up.scheduler.get("/models") if one["model"] == model]
    return {rest["stage"]: rest["leaves_in_s"] for rest in found["rests"]}


def _model_of(leaving: Leaving, function: str) -> str:
    """The one model that a function uses."""
    warm(leaving.up, leaving.rest, Asked(function))
    call_id = uuid.uuid4().hex
    leaving.rest.call(function, headers={"X-Call-Id": call_id})
    wait_until(lambda: bool(_models(leaving.up, call_id)), "the call is reported")
    (model,) = _models(leaving.up, call_id)
    return model


def _models(up: Stack, call_id: str) -> list[str]:
    """What a call's request named; nothing before it is reported."""
    try:
        return list(request_story(up.scheduler, call_id)["models"])
    except CommandError:
        return []


@pytest.mark.parametrize("stage", _STAGES)
def test_model_answers_from_the_stage_that_it_has_come_to(leaving: Leaving, stage: str) -> None:
    up, rest = leaving
    model = _model_of(leaving, stage)
    first = rest.call(stage).json()
    assert first["device"] == "cuda:0"
    expected = {"context": {"context", "host"}, "gone": set[str]()}.get(stage, {stage})
    for what in (stage, f"{stage} again"):
        wait_until(lambda: _rests(up, model).keys() == expected, what, instead=up.said)
        assert rest.call(stage).json() == first


@pytest.mark.parametrize("part", ["gpu-manager", "scheduler"])
@pytest.mark.parametrize("stage", ["context", "host", "disk"])
def test_model_answers_when_a_part_is_killed_in_that_stage(
    leaving: Leaving, stage: str, part: str
) -> None:
    up, rest = leaving
    model = _model_of(leaving, stage)
    first = rest.call(stage).json()
    wait_until(lambda: stage in _rests(up, model), stage, instead=up.said)

    _replaced(up, part)
    wait_until(lambda: _answers(rest, stage) == first, "the same answer", instead=up.said)


def test_books_are_right_when_the_manager_is_killed_between_any_two_steps(
    leaving: Leaving,
) -> None:
    """A call comes after each death, whatever step the model was taking; at last it is gone."""
    up, rest = leaving
    rest.deploy("steps", annotations=_of(up, "steps", 50, _QUICK))
    model = _model_of(leaving, "steps")
    first = rest.call("steps").json()
    for passed_s in (0.1, 0.4, 0.8):
        time.sleep(passed_s)  # in another stage each time, or on the way to the next one
        _replaced(up, "gpu-manager")
        wait_until(lambda: _answers(rest, "steps") == first, "it answers", instead=up.said)
    wait_until(lambda: not _rests(up, model), "the model is gone", instead=up.said)
    gpus = up.scheduler.get("/cluster")["gpus"]
    held = {each["model"] for gpu in gpus for each in (*gpu["residents"], *gpu["contexts"])}
    assert model not in held
    sizes = [each["memory_bytes"] for gpu in gpus for each in (*gpu["residents"], *gpu["contexts"])]
    assert sum(gpu["used_bytes"] for gpu in gpus) == sum(sizes)


def test_function_with_other_weights_answers_while_the_former_ones_go_on_leaving(
    leaving: Leaving,
) -> None:
    up, rest = leaving
    former = _model_of(leaving, "host")
    first, before = rest.call("host").json(), _known(up)
    wait_until(lambda: _rests(up, former).keys() == {"host"}, "stage 3", instead=up.said)
    rest.deploy("host", method="PUT", annotations=_of(up, "host", 99, _STAGES["host"]))
    wait_until(lambda: _answers(rest, "host") not in (None, first), "it has other weights")
    wait_until(lambda: bool(_answers(rest, "host")) and _known(up) > before, "another model")
    # The gateway may have expected the former one once more; it leaves again.
    wait_until(lambda: _rests(up, former).keys() == {"host"}, "stage 3 again", instead=up.said)
    rest.deploy("host", method="PUT", annotations=_of(up, "host", 1, _STAGES["host"]))

    def instead() -> str:
        answer = rest.call("host")
        return f"{answer.status_code} {answer.text}, and not {first}\n{up.said()}"

    former_again = "it has its former weights again"
    wait_until(lambda: _answers(rest, "host") == first, former_again, instead=instead)


def _known(up: Stack) -> set[str]:
    """Every model that the scheduler knows."""
    return {one["model"] for one in up.scheduler.get("/models")}


def _replaced(up: Stack, part: str) -> None:
    """Kill a part of the stack, and wait until there is another one."""
    killed = up.part(f"-m gpufaas {part}")
    assert killed, part
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: up.part(f"-m gpufaas {part}") not in {0, killed}, f"another {part}")


def _answers(rest: Rest, function: str) -> object:
    """What a function answers; nothing while a part is started again."""
    answer = rest.call(function)
    return answer.json() if answer.status_code == httpx.codes.OK else None


def test_model_that_the_disk_has_no_room_for_stays_in_memory_and_answers(leaving: Leaving) -> None:
    up, rest = leaving
    if shutil.disk_usage(up.folder / "spill").total > _DISK_BYTES:
        pytest.skip("no small disk can be mounted here")
    rest.deploy("large", annotations=_of(up, "large", 60, _STAGES["disk"], width=8192))
    model = _model_of(leaving, "large")
    first = rest.call("large").json()
    refused = "cannot spill weights"
    log = up.state / "logs" / "gpu-manager.log"
    wait_until(lambda: refused in log.read_text(), "the disk is full", instead=up.said)
    for again in ("in memory", "in memory again"):
        wait_until(lambda: _rests(up, model).keys() == {"host"}, again, instead=up.said)
        assert rest.call("large").json() == first
    small = _model_of(leaving, "disk")  # the others still find their way to the disk
    wait_until(lambda: _rests(up, small).keys() == {"disk"}, "another one", instead=up.said)


def test_time_left_is_shown(leaving: Leaving) -> None:
    up, _ = leaving
    model = _model_of(leaving, "context")
    wait_until(lambda: "context" in _rests(up, model), "the empty process")
    left_s = _rests(up, model)["context"]
    assert left_s is not None
    assert 500 < left_s <= 600
    where = ("--scheduler", up.scheduler_url, "--secret-file", str(up.state / "secret"))
    shown = up.run("models", *where)
    assert "context of " in shown.stdout, shown.stderr


def test_unknown_rule_is_refused_at_deployment(leaving: Leaving) -> None:
    written = dict(handlers.write(leaving.up.work, "wrong", handlers.ON_GPU))
    annotations = written | {"com.gpufaas.exit": "soon"}
    said = {"service": "wrong", "image": "e2e/wrong:latest", "annotations": annotations}
    answer = leaving.rest.ask("POST", "/system/functions", said)
    assert answer.status_code == httpx.codes.BAD_REQUEST
    assert "com.gpufaas.exit" in answer.text
