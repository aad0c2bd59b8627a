"""16 models on 4 GPUs with room for 4 each, through HTTP: ours beside Ray Serve's multiplexing."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from bench import gateway_functions as functions
from bench import peers
from bench.gateway_calls import learned, stack
from bench.gateway_load import Figures, all_of, figures, request
from bench.gateway_up import NotUp, Up
from bench.live_load import ZIPF_GPUS, ZIPF_MODELS, ZIPF_ROOM, zipf, zipf_models
from bench.live_runs import ZIPF_CALLERS, ZIPF_MEASURED, ZIPF_WARMING
from bench.peers import Peer
from gpufaas.remote import Remote, in_path
from scheduler.service.access import Role, token

# Four models fit, and so does the first guess of what one takes beyond its weights.
_GPU_MEMORY_BYTES = 88 << 20
_LOAD_S, _RUN_S = 0.25, 0.02
_MISS = "201"
_REST_S, _ASK_S = 10.0, 0.05


@dataclass(frozen=True, slots=True)
class Zipf:
    """What the measured calls came to."""

    figures: Figures
    hit_ratio: float


@contextmanager
def warm_stack() -> Iterator[Up]:
    """Sixteen functions, each of which has traced its model and had a lease for it."""
    options = {
        "--devices": f"cpu:{ZIPF_GPUS}",
        "--gpu-memory": str(_GPU_MEMORY_BYTES),
        "--emulate-load": str(_LOAD_S),
        "--emulate-run": str(_RUN_S),
    }
    with stack(*(word for pair in options.items() for word in pair)) as running:
        for number in range(ZIPF_MODELS):
            running.deploy(functions.model(number))
        for number in range(ZIPF_MODELS):
            name = functions.model_name(number)
            running.ready(name)
            learned(running, name, b"")
        _check_room(running)
        yield running


def ours(running: Up, seed: int) -> Zipf:
    """Cold caches: all models leave the GPUs first."""
    _evict_all(running)
    calls = [request(f"/function/{functions.model_name(number)}") for number in range(ZIPF_MODELS)]
    order = chosen(seed)
    all_of(running.url, calls, ZIPF_CALLERS, iter(order[:ZIPF_WARMING]))
    before = running.cache()
    found = figures(all_of(running.url, calls, ZIPF_CALLERS, iter(order[ZIPF_WARMING:])))
    ratio = running.cache().since(before).hit_ratio
    return Zipf(found, float("nan") if ratio is None else ratio)


def of_ray(seed: int, what: str) -> Zipf:
    """The same calls to Ray Serve; a new one, whose caches are cold. `peers_ray.py` says what."""
    calls = [
        request("/", f"serve_multiplexed_model_id: m{number}\r\n") for number in range(ZIPF_MODELS)
    ]
    order = chosen(seed)
    with peers.serving(Peer.RAY, what) as served:
        all_of(served.url, calls, ZIPF_CALLERS, iter(order[:ZIPF_WARMING]))
        outcome = all_of(served.url, calls, ZIPF_CALLERS, iter(order[ZIPF_WARMING:]))
    statuses = outcome.tally.figures().statuses
    return Zipf(figures(outcome), 1.0 - statuses.get(_MISS, 0) / ZIPF_MEASURED)


def chosen(seed: int) -> list[int]:
    """The same models in the same order as in `bench.live`."""
    models = zipf_models()
    numbers = {model.id: number for number, model in enumerate(models)}
    return [numbers[each] for each in zipf(models, ZIPF_WARMING + ZIPF_MEASURED, seed)]


def _evict_all(running: Up) -> None:
    _at_rest(running)
    administrator = _administrator(running)
    for gpu in running.cluster()["gpus"]:
        for resident in gpu["residents"]:
            administrator.post(f"/models/{in_path(resident['model'])}/evict", gpu=gpu["id"])
    left = [gpu["residents"] for gpu in running.cluster()["gpus"] if gpu["residents"]]
    if left:
        raise NotUp(f"not evicted: {json.dumps(left)}")


def _at_rest(running: Up) -> None:
    """Wait until every lease has been given back, which happens after the answer."""
    patience_s = time.monotonic() + _REST_S
    while any(slot["leases"] for gpu in running.cluster()["gpus"] for slot in gpu["slots"]):
        if time.monotonic() > patience_s:
            raise NotUp(f"leases are held for {_REST_S:g} s after the last answer")
        time.sleep(_ASK_S)


def _check_room(running: Up) -> None:
    """Four models fit on a GPU, and five do not."""
    sizes = [model["memory_bytes"] for model in running.scheduler.get("/models")]
    most, least = max(sizes) * ZIPF_ROOM, min(sizes) * (ZIPF_ROOM + 1)
    if len(sizes) != ZIPF_MODELS or not most <= _GPU_MEMORY_BYTES < least:
        raise NotUp(f"{len(sizes)} models of {min(sizes)} to {max(sizes)} bytes")


def _administrator(running: Up) -> Remote:
    bearer = token(running.folder.secret_file.read_bytes(), Role.ADMIN)
    state = running.folder.running()
    if state is None:
        raise NotUp("the stack is gone")
    return Remote((state.scheduler,), bearer)
