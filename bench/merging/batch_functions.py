"""Our functions for the comparison of batching: `model(x)` for one call, and for a list."""

import shutil
from enum import StrEnum
from pathlib import Path

from bench.measure.peers import four_models

MOST = 32
_BUILD = "batching"
_THREADS = "32"  # calls of `handle` that can wait for the GPU at once, as one list has
_HANDLER = '''"""One of four models: a call alone, or a list of calls."""

import json
import os

import torch

from .four_models import input_of, made, shown

NAME = os.environ["MODEL"]
model = made(NAME).cuda()


def scores(requests):
    rows = torch.stack([input_of(NAME, request) for request in requests])
    with torch.no_grad():
        return [shown(row) for row in model(rows.cuda()).cpu()]


def handle(event, context):
    return scores([json.loads(event.body)])[0]


def handle_batch(events, context):
    return scores([json.loads(event.body) for event in events])
'''


class OwnWay(StrEnum):
    """A way in which ours serves the models."""

    SINGLY = "singly"
    MERGED = "merged"
    LISTS = "lists"


_WISHES = {
    OwnWay.SINGLY: {"com.gpufaas.batch": "off"},
    OwnWay.MERGED: {},
    OwnWay.LISTS: {"com.gpufaas.batch-handler": str(MOST)},
}


def write_build(folder: Path) -> None:
    """The function's folder, as `faas-cli build --shrinkwrap` leaves it."""
    build = folder / _BUILD / "function"
    build.mkdir(parents=True)
    (build / "handler.py").write_text(_HANDLER, encoding="utf-8")
    shutil.copy(four_models.__file__, build)


def name_of(model: str, way: OwnWay) -> str:
    """What the function is called."""
    return f"{model}-{way}".replace("_", "-")


def deployment(model: str, way: OwnWay) -> dict[str, object]:
    """The deployment of one model."""
    return {
        "service": name_of(model, way),
        "image": _BUILD,
        "envVars": {"MODEL": model, "GPUFAAS_THREADS": _THREADS},
        "labels": {"com.openfaas.scale.max": "1"},
        "annotations": {"com.gpufaas.enabled": "true", **_WISHES[way]},
    }
