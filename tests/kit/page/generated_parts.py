"""The parts of a generated cluster, and the explanation of a generated request."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway_ext.ui.state import Json

GIB = 1 << 30
NAMESPACE = "openfaas-fn"
IDLE_SHARE = 0.3  # of the slots that a decision did not choose
KINDS = (("NVIDIA H100 80GB HBM3", 80), ("NVIDIA A100-SXM4-40GB", 40), ("NVIDIA L4", 24))
NAMES = (
    *("resnet", "bert", "whisper", "clip", "llama", "yolo", "vit", "t5", "mistral", "sam"),
    *("gpt2", "detr", "roberta", "swin", "phi", "gemma", "convnext", "deberta", "bark", "e5"),
)
POLICIES: tuple[dict[str, Any], ...] = (
    {
        "name": "lalbo3",
        "meaning": "Idle holders first; a request is passed over at most o3_limit times.",
        "parameters": [
            {
                "name": "o3_limit",
                "type": "int",
                "value": 25,
                "default": 25,
                "meaning": "how often a request may be passed over",
            },
            {
                "name": "parallel",
                "type": "int",
                "value": 1,
                "default": 1,
                "meaning": "how many at once",
            },
        ],
    },
    {
        "name": "lb",
        "meaning": "The least used idle slot takes the first request that waits.",
        "parameters": [],
    },
    {
        "name": "netgain",
        "meaning": "Moves a request where it gains more than it costs the others.",
        "parameters": [
            {
                "name": "patience",
                "type": "float",
                "value": 20.0,
                "default": 20.0,
                "meaning": "how many may overtake the first",
            }
        ],
    },
)


@dataclass(frozen=True, slots=True)
class GeneratedFunction:
    """One function, and the model that its calls use."""

    name: str
    model: str
    bytes: int
    load_s: float
    run_s: float
    image: str


@dataclass(slots=True)
class GeneratedResident:
    """One model on a GPU."""

    function: GeneratedFunction
    used_s: float
    uses: int = 1
    pinned: bool = False
    loaded_s: float = 0.0


@dataclass(slots=True)
class GeneratedRun:
    """One request that has a GPU."""

    request: str
    function: GeneratedFunction
    arrived_s: float
    since_s: float
    end_s: float
    load_s: float
    hit: bool
    number: int


@dataclass(slots=True)
class GeneratedGpu:
    """One GPU, its models from the least to the most recently used."""

    id: str
    node: str
    kind: str
    bytes: int
    residents: dict[str, GeneratedResident] = field(default_factory=dict)
    running: GeneratedRun | None = None
    state: str = ""

    @property
    def used_bytes(self) -> int:
        return sum(held.function.bytes for held in self.residents.values())


@dataclass(slots=True)
class GeneratedCalls:
    """What is counted of a function."""

    calls: int = 0
    errors: int = 0
    gpu_s: float = 0.0
    in_flight: int = 0


def a_function(number: int, chance: random.Random) -> GeneratedFunction:
    """A generated function with a model of some size."""
    name = NAMES[number % len(NAMES)] + (f"-{number // len(NAMES)}" if number >= len(NAMES) else "")
    size_bytes = int(chance.choice((0.9, 1.6, 3.2, 6.5, 13.0, 15.5)) * GIB)
    digest = f"{chance.getrandbits(80):020x}"
    return GeneratedFunction(
        name,
        f"{NAMESPACE}/{digest}",
        size_bytes,
        load_s=0.2 + size_bytes / (8 * GIB),
        run_s=chance.uniform(0.1, 1.2),
        image=f"example/{name}:1.{number % 7}",
    )


def a_gpu(
    number: int, functions: Sequence[GeneratedFunction], began_s: float, chance: random.Random
) -> GeneratedGpu:
    """A GPU that holds some models already; few are silent or drain."""
    kind, gib = KINDS[(number // 4) % len(KINDS)]
    node = f"node-{number // 4:02d}"
    gpu = GeneratedGpu(f"{node}/cuda:{number}", node, kind, gib * GIB)
    if number and number % 37 == 0:
        gpu.state = "silent"
    elif number and number % 29 == 0:
        gpu.state = "draining"
    for function in chance.sample(functions, min(len(functions), 5)):
        if gpu.used_bytes + function.bytes <= gpu.bytes * 0.9:
            used_s = began_s - chance.uniform(1, 900)
            gpu.residents[function.model] = GeneratedResident(function, used_s)
    gpu.residents = dict(sorted(gpu.residents.items(), key=lambda pair: pair[1].used_s))
    return gpu


def poisson(chance: random.Random, mean: float) -> int:
    """How many of what comes at random times come in a span in which `mean` are expected."""
    count, left = 0, chance.expovariate(1.0)
    while left < mean:
        count, left = count + 1, left + chance.expovariate(1.0)
    return count


def measured(function: GeneratedFunction) -> Json:
    """A function's model with its times, as the scheduler shows one."""
    run_s = function.run_s
    configured = [
        {"batch": 4, "vcpus": 2, "vgpus": n, "gpu_type": "H200 1/7", "run_s": 3 * run_s / n}
        for n in (1, 2)
    ]
    return {
        "model": function.model,
        "memory_bytes": function.bytes,
        "load_s": {"host": function.load_s, "disk": 4 * function.load_s},
        "run_s": {"1 on H200 1/7": run_s},
        "configured": configured,
    }


def explained(
    decision: Mapping[str, Any], gpus: list[str], chance: random.Random, now_s: float
) -> Json:
    """As the scheduler explains a request."""
    load_s, run_s = decision["load_s"], decision["run_s"]
    candidates = [
        {
            "slot": gpu, "idle": gpu == decision["gpu"] or chance.random() < IDLE_SHARE,
            "cached": gpu == decision["gpu"] and decision["hit"], "frequency": chance.randrange(90),
            "wait_s": 0.0 if gpu == decision["gpu"] else chance.uniform(0, 3), "load_s": load_s,
            "run_s": 0.5,
        }
        for gpu in [decision["gpu"], *(g for g in gpus if g != decision["gpu"])][:64]
    ]  # fmt: skip
    for candidate in candidates[:3]:
        candidate["terms"] = {"waiting": chance.uniform(1, 9), "load": -candidate["load_s"]}
    came = {
        "lease": decision["number"], "load_s": load_s, "failed_loads": {},
        "loaded_from": {} if decision["hit"] else {decision["models"][0]: "host"},
        "run_s": run_s or 0.0, "runs": 0 if run_s is None else 3,
        "held_s": None if run_s is None else run_s + load_s,
    }  # fmt: skip
    why = {
        "request": decision["request"], "decided_s": decision["at"],
        "waited_s": decision["waited_s"], "policy": "lalbo3", "rule": decision["rule"],
        "chosen": decision["gpu"], "visits": 0, "queue_length": 4, "ahead": 1,
        "candidates": candidates, "victims": [],
    }  # fmt: skip
    return {
        "request": decision["request"], "function": f"{NAMESPACE}/{decision['function']}",
        "models": decision["models"], "labels": {decision["models"][0]: decision["function"]},
        "batch": 1, "priority": 0, "arrived_ago_s": now_s - decision["at"] + decision["waited_s"],
        "waited_s": decision["waited_s"], "outcome": decision["outcome"], "reason": "",
        "total_s": None if run_s is None else decision["waited_s"] + load_s + run_s,
        "used": {"gpu_s": run_s or 0.0, "gpu_byte_s": 1e9 * (run_s or 0.0), "cost": None},
        "rests": [{
            "model": decision["models"][0], "stage": "gpu", "place": decision["gpu"],
            "leaves_in_s": 12.0,
        }],
        "decisions": [{
            "after_s": decision["waited_s"], "what": "placed", "rule": decision["rule"],
            "slot": decision["gpu"], "gpu": decision["gpu"],
            "node": decision["gpu"].partition("/")[0], "hit": decision["hit"],
            "held_elsewhere": decision["false_miss"], "more_slots": [f"{decision['gpu']}.1"],
            "configuration": {"batch": 2, "vcpus": 3, "vgpus": 2},
            "estimate": {"load_s": load_s, "run_s": 0.5}, "why": why, "came": came,
        }],
    }  # fmt: skip


def letter(number: int, now_s: float) -> Json:
    """A dead letter, as the routes show it."""
    why = "the function answered 500 ten times" if number % 2 else "nothing of it was ready"
    return {
        "id": number, "call": f"call-{number:04d}", "function": f"{NAMES[number]}.{NAMESPACE}",
        "at": now_s - 1000 + number, "tries": 10, "why": why,
    }  # fmt: skip
