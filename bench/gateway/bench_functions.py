"""The functions of the gateway's benches, as a person would write them."""

import shutil
from collections.abc import Mapping
from pathlib import Path

from bench.measure.peers import two_layers

PLAIN = "noop"
GPU = "gpu-noop"
BUSY = "busy"
COMPUTING = "computing"
LISTS = "lists"
WARM = b"warm"
MODELS = 16

_PLAIN = '''"""Does nothing."""


def handle(event, context):
    return "hello"
'''

_BUSY = '''"""Computes for 3 ms in each call."""

import time


def handle(event, context):
    until_s = time.thread_time() + 0.003
    while time.thread_time() < until_s:
        pass
    return "done"
'''

# Its calls get a GPU lease and do not use it; a call with the body `warm` uses the model, so
# that the gateway learns what to lease.
_GPU = '''"""Has a GPU, and uses it only for a call with the body `warm`."""

import torch

model = torch.nn.Linear(64, 64).eval().cuda()


def handle(event, context):
    if event.body == b"warm":
        with torch.no_grad():
            return {"sum": float(model(torch.ones(1, 64, device="cuda")).sum())}
    return "hello"
'''

# Weights of its own: the cluster counts it as another model. Much memory, little work.
_MODEL = '''"""One small model, with weights of its own."""

import os

import torch

torch.manual_seed(int(os.environ["SEED"]))
model = torch.nn.Embedding(80_000, 64).eval().cuda()
words = torch.arange(8).cuda()


def handle(event, context):
    with torch.no_grad():
        return {"sum": float(model(words).sum())}
'''

# One run of the model answers a whole list.
_LISTS = '''"""A small model that takes lists of calls."""

import torch

torch.manual_seed(0)
model = torch.nn.Embedding(80_000, 64).eval().cuda()


def handle_batch(events, context):
    words = torch.arange(8 * len(events), device="cuda").reshape(len(events), 8)
    with torch.no_grad():
        return [{"sum": total} for total in model(words).sum((1, 2)).tolist()]
'''

# The model that the peers serve too.
_COMPUTING = '''"""Scores the numbers of a request with two small layers."""

import os

from .two_layers import numbers_of, scores, two_layers

model = two_layers(int(os.environ["SEED"])).cuda()


def handle(event, context):
    return {"scores": scores(model, numbers_of(event.body), "cuda")}
'''

# An instance that starts meanwhile would take its time from what is measured.
_ONE = {"com.openfaas.scale.max": "1"}
_HANDLERS: Mapping[str, str] = {
    PLAIN: _PLAIN,
    BUSY: _BUSY,
    GPU: _GPU,
    "model": _MODEL,
    LISTS: _LISTS,
    COMPUTING: _COMPUTING,
}


def write_builds(folder: Path) -> None:
    """Their folders, as `faas-cli build --shrinkwrap` leaves them."""
    for name, handler in _HANDLERS.items():
        build = folder / name / "function"
        build.mkdir(parents=True)
        (build / "handler.py").write_text(handler, encoding="utf-8")
    shutil.copy(two_layers.__file__, folder / COMPUTING / "function")


def plain() -> dict[str, object]:
    """The deployment of the function that does nothing."""
    return {"service": PLAIN, "image": PLAIN, "labels": _ONE}


def busy() -> dict[str, object]:
    """The deployment of the function that computes."""
    return {"service": BUSY, "image": BUSY, "labels": _ONE}


def gpu() -> dict[str, object]:
    """The deployment of the function that does nothing with a GPU."""
    return {"service": GPU, "image": GPU, **_with_gpu()}


def model(number: int) -> dict[str, object]:
    """The deployment of one of the functions with a model."""
    return {
        "service": model_name(number),
        "image": "model",
        "envVars": {"SEED": str(number)},
        **_with_gpu(),
    }


def computing(seed: int, instances: int) -> dict[str, object]:
    """The deployment of one of the functions that compute."""
    return {
        "service": computing_name(seed),
        "image": COMPUTING,
        "envVars": {"SEED": str(seed)},
        **_with_gpu(),
        "labels": {f"com.openfaas.scale.{end}": str(instances) for end in ("min", "max")},
    }


def lists(together: int) -> dict[str, object]:
    """The deployment of the function that takes lists of so many calls at most."""
    annotations = {"com.gpufaas.enabled": "true", "com.gpufaas.batch-handler": str(together)}
    return {"service": LISTS, "image": LISTS, "labels": _ONE, "annotations": annotations}


def model_name(number: int) -> str:
    """What it is called."""
    return f"model-{number:02d}"


def computing_name(seed: int) -> str:
    """The name of the function that computes with the weights of this seed."""
    return f"{COMPUTING}-{seed}"


def _with_gpu() -> dict[str, object]:
    return {"labels": _ONE, "annotations": {"com.gpufaas.enabled": "true"}}
