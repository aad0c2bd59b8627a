"""The thesis's workload, faster, on one GPU: functions of a whole stack, beside the simulator.

Functions run through `gpufaas up` with the state in memory, so that no etcd is needed.
"""

import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from bench.gpu.gpu_bench import STORE_BYTES, PartOptions, Say
from bench.gpu.parts.profile import profile_of
from bench.measure.report import MeasurementFailed
from bench.measure.whole_stack import StackNotReady, WholeStack, whole_stack
from cache_manager.model.ids import ModelId
from scheduler.composition import make_core
from scheduler.sim.engine import Engine
from scheduler.sim.model_catalogue import Hardware
from scheduler.sim.simulation_tally import percentile
from scheduler.sim.workload import Workload
from tests.kit.live.live_load import thesis

POLICIES = ("lalbo3", "lb")
_GPU_MB = 7982  # the thesis's RTX 2080
_HANDLER = '''"""One model of the thesis's Table 1, with a batch of pictures."""

import os

import torch

name, batch = os.environ["MODEL"], int(os.environ["BATCH"])
torch.manual_seed(int(os.environ["SEED"]))
if name == "linear":
    model, pictures = torch.nn.Linear(64, 64), torch.rand(batch, 64)
else:
    from torchvision.models import get_model

    more = {"init_weights": False} if name == "inception_v3" else {}
    side = 299 if name == "inception_v3" else 224
    model, pictures = get_model(name, weights=None, **more), torch.rand(batch, 3, side, side)
model = model.eval().cuda()


def handle(event, context):
    with torch.no_grad():
        return {"sum": float(model(pictures.cuda()).float().sum())}
'''
_CALLERS, _STARTS = 64, 6
_DOWN_S = 20.0


@dataclass(frozen=True, slots=True)
class _Load:
    """How many functions, and for how many seconds six minutes of the thesis's load are asked."""

    functions: int
    minutes: int
    within_s: float
    gpu_mb: int
    batch: int


_REAL = _Load(functions=15, minutes=6, within_s=45.0, gpu_mb=_GPU_MB, batch=32)
_EMULATED = _Load(functions=3, minutes=1, within_s=3.0, gpu_mb=160, batch=1)


def measure(asked: PartOptions, say: Say) -> None:
    """One row live and one simulated for each policy."""
    load = _EMULATED if asked.emulated else _REAL
    with tempfile.TemporaryDirectory(prefix="gpu-workload") as name:
        root = Path(name)
        root.chmod(0o755)  # functions are other users
        handler = root / "build" / "model" / "function" / "handler.py"
        handler.parent.mkdir(parents=True)
        handler.write_text(_HANDLER, encoding="utf-8")
        options = ["--without-etcd", "--devices", asked.devices]
        options += ["--gpu-memory", f"{load.gpu_mb}MiB"]
        if not asked.emulated:
            options += ["--store-memory", str(STORE_BYTES)]
        try:
            with whole_stack(root, options) as running:
                _measure(running, asked, load, say)
        finally:
            for log in sorted((root / "state" / "logs").glob("*.log")):
                print(log, log.read_text(encoding="utf-8", errors="replace"), sep="\n", flush=True)


def _measure(running: WholeStack, asked: PartOptions, load: _Load, say: Say) -> None:
    asked_for = thesis(1, load.minutes, load.within_s, 1, load.functions)
    began_s = time.monotonic()
    _start(running, asked_for, load, small=asked.emulated)
    say({"functions": load.functions, "ready_s": time.monotonic() - began_s})
    for policy in POLICIES:
        if asked.left_s() < load.within_s + _DOWN_S:
            raise MeasurementFailed(f"no time was left for {policy}")
        running.evict_all()
        running.set_policy(policy)
        say(_live(running, asked_for, policy))
        simulated = _simulated(asked, asked_for, policy, load)
        if simulated is not None:
            say(simulated)


def _start(running: WholeStack, found: Workload, load: _Load, *, small: bool) -> None:
    """Deploy every function, and call each once so that its graph is traced."""
    for number, model in enumerate(found.models):
        running.deploy(
            {
                "service": _function(model.id),
                "image": "model",
                "labels": {"com.openfaas.scale.max": "1"},
                "annotations": {"com.gpufaas.enabled": "true"},
                "envVars": {
                    "MODEL": "linear" if small else _original(model.id).replace(".", "_"),
                    "BATCH": str(load.batch),
                    "SEED": str(number),
                    "GPUFAAS_TRACING": "wait",  # else first calls run on the processor
                },
            }
        )

    def first(model: ModelId) -> None:
        running.ready(_function(model))
        for _ in range(3):
            running.call(_function(model), b"")

    with ThreadPoolExecutor(_STARTS) as pool:
        list(pool.map(first, [model.id for model in found.models]))


def _live(running: WholeStack, found: Workload, policy: str) -> dict[str, object]:
    """The requests at their times, each on its own thread; latencies as callers see them."""
    before = running.cache()
    latencies: list[float] = []
    failures: list[str] = []
    began_s = time.monotonic()

    def call(model: ModelId, at_s: float) -> None:
        try:
            running.call(_function(model), b"")
        except (StackNotReady, OSError) as error:
            failures.append(str(error)[:200])
        else:
            latencies.append(time.monotonic() - began_s - at_s)

    with ThreadPoolExecutor(_CALLERS) as pool:
        for at_s, model in found.arrivals:
            time.sleep(max(0.0, began_s + at_s - time.monotonic()))
            pool.submit(call, model, at_s)
    if failures:
        raise MeasurementFailed(f"{len(failures)} calls failed, the first: {failures[0]}")
    counts = running.cache().since(before)
    if not counts.hits + counts.misses:
        raise MeasurementFailed(f"{policy}: no request had a lease, so functions ran without GPU")
    return _figures("live", policy, latencies, counts.hit_ratio)


def _simulated(
    asked: PartOptions, found: Workload, policy: str, load: _Load
) -> dict[str, object] | None:
    """The same requests in the simulator with the measured profile; None without one."""
    table = profile_of(asked)
    if table is None or any(_original(model.id) not in table for model in found.models):
        return None
    models = tuple(replace(table[_original(model.id)], id=model.id) for model in found.models)
    run = Engine(make_core(policy), Hardware(1, load.gpu_mb), Workload(models, found.arrivals))
    tally = run.run().tally
    summary = tally.summary()
    return _figures("simulated", policy, tally.latencies, 1.0 - summary.miss_ratio)


def _figures(
    how: str, policy: str, latencies: Sequence[float], hit_ratio: float | None
) -> dict[str, object]:
    ordered = sorted(latencies)
    return {
        "how": how,
        "policy": policy,
        "requests": len(ordered),
        "hit_ratio": hit_ratio,
        "average_s": fmean(ordered),
        "p50_s": percentile(ordered, 0.50),
        "p99_s": percentile(ordered, 0.99),
    }


def _original(model: ModelId) -> str:
    return model.partition("#")[0]


def _function(model: ModelId) -> str:
    return model.replace(".", "-").replace("_", "-").replace("#", "-copy-")
