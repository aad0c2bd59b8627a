"""16 models on 4 GPUs with room for 4 each, through HTTP: ours beside Ray Serve's multiplexing.

Ours under each of two policies: `lalbo3`, where a load has the GPU to itself, and `beside`.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from bench.gateway import bench_functions
from bench.gateway.bench_stacks import call_until_leased, stack_of_builds
from bench.gateway.measured_calls import usage_of_peer, usage_of_stack
from bench.measure.call_costs import CallCosts, call_costs
from bench.measure.load_figures import LoadFigures, figures_of, http_post, load_of
from bench.measure.peers import peer_servers
from bench.measure.peers.peer_installs import PeerSystem
from bench.measure.peers.peer_servers import PeerProgram
from bench.measure.whole_stack import StackNotReady, WholeStack
from tests.kit.live.live_load import ZIPF_GPUS, ZIPF_MODELS, ZIPF_ROOM, zipf, zipf_models
from tests.kit.live.live_runs import ZIPF_CALLERS, ZIPF_MEASURED, ZIPF_WARMING

# Four models of 20.5 MB of weights fit, and five do not.
_GPU_MEMORY_BYTES = 96 << 20
_LOAD_S, _RUN_S = 0.25, 0.02
_MISS = "201"
_MEASURED_S, _ASK_S = 20.0, 0.2


@dataclass(frozen=True, slots=True)
class ZipfRun:
    """The costs of the measured calls, and how many of them found their model on a GPU."""

    costs: CallCosts
    hit_ratio: float

    @property
    def figures(self) -> LoadFigures:
        """Rates and times of the measured calls."""
        return self.costs.figures


@contextmanager
def warm_stack(gpu_overlap: int = 1) -> Iterator[WholeStack]:
    """A stack with sixteen functions that have traced their models and had a lease for each."""
    options = {
        "--gpu-overlap": str(gpu_overlap),
        "--devices": f"cpu:{ZIPF_GPUS}",
        "--gpu-memory": str(_GPU_MEMORY_BYTES),
        "--emulate-load": str(_LOAD_S),
        "--emulate-run": str(_RUN_S),
    }
    with stack_of_builds(*(word for pair in options.items() for word in pair)) as running:
        for number in range(ZIPF_MODELS):
            running.deploy(bench_functions.model(number))
        for number in range(ZIPF_MODELS):
            name = bench_functions.model_name(number)
            running.ready(name)
            call_until_leased(running, name, b"")
        _check_room(running)
        yield running


def ours(running: WholeStack, seed: int, policy: str) -> ZipfRun:
    """Cold caches: all models leave the GPUs first."""
    running.set_policy(policy)
    running.evict_all()
    calls = [
        http_post(f"/function/{bench_functions.model_name(number)}")
        for number in range(ZIPF_MODELS)
    ]
    order = chosen(seed)
    load_of(running.url, calls, ZIPF_CALLERS, iter(order[:ZIPF_WARMING]))
    before = running.cache()
    found = call_costs(
        lambda: figures_of(load_of(running.url, calls, ZIPF_CALLERS, iter(order[ZIPF_WARMING:]))),
        partial(usage_of_stack, running.pid),
    )
    ratio = running.cache().since(before).hit_ratio
    return ZipfRun(found, float("nan") if ratio is None else ratio)


def of_ray(seed: int, program: PeerProgram) -> ZipfRun:
    """The same calls to a new Ray Serve with cold caches; `ray_server.py` explains the programs."""
    calls = [
        http_post("/", f"serve_multiplexed_model_id: m{number}\r\n")
        for number in range(ZIPF_MODELS)
    ]
    order = chosen(seed)
    with peer_servers.peer_server(PeerSystem.RAY, program) as served:
        load_of(served.url, calls, ZIPF_CALLERS, iter(order[:ZIPF_WARMING]))
        statuses: dict[str, int] = {}

        def put_load() -> LoadFigures:
            outcome = load_of(served.url, calls, ZIPF_CALLERS, iter(order[ZIPF_WARMING:]))
            statuses.update(outcome.tally.figures().statuses)
            return figures_of(outcome)

        found = call_costs(put_load, partial(usage_of_peer, served.pid))
    return ZipfRun(found, 1.0 - statuses.get(_MISS, 0) / ZIPF_MEASURED)


def chosen(seed: int) -> list[int]:
    """The same models in the same order as in `bench.live`."""
    models = zipf_models()
    numbers = {model.id: number for number, model in enumerate(models)}
    return [numbers[each] for each in zipf(models, ZIPF_WARMING + ZIPF_MEASURED, seed)]


def _check_room(running: WholeStack) -> None:
    """Wait until four models fit on a GPU, and five do not: runs are measured, and reported."""
    patience_s = time.monotonic() + _MEASURED_S
    while True:
        sizes = sorted(model["memory_bytes"] for model in running.scheduler.get("/models"))
        most, least = sum(sizes[-ZIPF_ROOM:]), sum(sizes[: ZIPF_ROOM + 1])
        if len(sizes) == ZIPF_MODELS and most <= _GPU_MEMORY_BYTES < least:
            return
        if time.monotonic() > patience_s:
            raise StackNotReady(f"models of {sizes} bytes")
        time.sleep(_ASK_S)
