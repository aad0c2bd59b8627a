"""Staged exit through real processes: a model answers from every stage that it has come to."""

import os
import signal
import uuid
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import httpx
import pytest

from gpufaas.errors import CommandError
from gpufaas.remote.scheduler_api import request_story
from tests.e2e import handlers
from tests.e2e.load import Asked, warm
from tests.e2e.stack import Rest, Stack, stack
from tests.kit.waiting import wait_until

# The last stage that each function's model comes to, and the rule that leaves it there.
_STAGES = {
    "context": "fixed:0.2,600,600,600",
    "host": "fixed:0.2,0,600,600",
    "disk": "fixed:0.2,0,0.2,600",
    "gone": "fixed:0.2,0,0.2,0.2",
}
_GPU = {"com.gpufaas.enabled": "true"}


class Leaving(NamedTuple):
    """A stack whose models leave, and its gateway."""

    up: Stack
    rest: Rest


@pytest.fixture(scope="module")
def leaving(environment: Mapping[str, str]) -> Iterator[Leaving]:
    """A stack whose models never leave, with a function for each stage, which says otherwise."""
    with stack(environment) as found:
        found.start("--spill", str(found.folder / "spill"))
        rest = Rest(found)
        for number, (stage, rule) in enumerate(_STAGES.items()):
            text = handlers.ON_GPU.replace("manual_seed(0)", f"manual_seed({number})")
            text = text.replace('"pid": os.getpid()', '"sum": round(float(answer().sum()), 4)')
            written = dict(handlers.write(found.work, stage, text))
            rest.deploy(stage, annotations=written | _GPU | {"com.gpufaas.exit": rule})
        yield Leaving(found, rest)


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

    killed = up.part(f"gpufaas.cli {part}")
    os.kill(killed, signal.SIGKILL)

    wait_until(lambda: up.part(f"gpufaas.cli {part}") not in {0, killed}, f"another {part}")
    wait_until(lambda: _answers(rest, stage) == first, "the same answer", instead=up.said)


def _answers(rest: Rest, function: str) -> object:
    """What a function answers; nothing while a part is started again."""
    answer = rest.call(function)
    return answer.json() if answer.status_code == httpx.codes.OK else None


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
