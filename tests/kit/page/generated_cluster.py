"""A generated cluster for the page: GPUs, functions and requests that change over time."""

import math
import random
import time
from collections.abc import Mapping
from typing import Any

from gateway_ext.errors import OwnStatus, UnknownJob
from gateway_ext.ui.shown_names import in_order
from gateway_ext.ui.state import Json, PageState, Point
from tests.kit.page.generated_parts import (
    NAMESPACE,
    POLICIES,
    GeneratedCalls,
    GeneratedFunction,
    GeneratedGpu,
    GeneratedResident,
    GeneratedRun,
    a_function,
    a_gpu,
    explained,
    letter,
    measured,
    poisson,
)

_WAIT_FOR_HOLDER_S = 2.0  # after which a request runs on a GPU that lacks its model
_FAILING_SHARE = 0.01  # of the requests


class GeneratedCluster:
    """Stands for a `PageSource`: its time passes, and it carries out every order at once."""

    def __init__(self, gpus: int = 6, functions: int = 12, *, seed: int = 7) -> None:
        self._random = random.Random(seed)
        self._began_s = self._at_s = time.time() - 200 * 0.2
        self.functions = [a_function(number, self._random) for number in range(functions)]
        self.gpus = {
            gpu.id: gpu
            for gpu in (
                a_gpu(number, self.functions, self._began_s, self._random) for number in range(gpus)
            )
        }
        self.queue: list[tuple[str, GeneratedFunction, float]] = []
        self.called = {function.name: GeneratedCalls() for function in self.functions}
        self.decisions: dict[str, dict[str, Any]] = {}
        self.counts = dict.fromkeys(("requests", "hits", "misses", "false_misses", "evictions"), 0)
        self.policy: dict[str, Any] = {"name": "lalbo3", "parameters": {"o3_limit": 25}}
        self.letters = {number: letter(number, self._began_s) for number in (3, 4, 9)}
        self.workflows: list[Json] = []
        self.owners: Json = {"count": 0, "rows": []}
        self.rate = gpus / 1.25
        self.ordered: list[tuple[str, str, str | None]] = []
        for _ in range(200):  # so that there is a past
            self._go_on(self._at_s + 0.2)

    # -- as the page asks -------------------------------------------------------------------------

    async def look(self) -> PageState:
        self._go_on(time.time())
        whole: dict[str, Any] = {
            "scheduler": {
                "url": "http://127.0.0.1:7700", "leader": "s0", "term": 7, "etcd": "ok",
                "skew_s": 0.0, "ok": True, "why": "",
            },
            "policy": self.policy,
            "policies": POLICIES,
            "queue": self._queue(),
            "totals": self._totals(),
            "dead_letters": self._letters(), "workflows": self.workflows,
            "owners": self.owners,
            "alerts": self._alerts(),
        }  # fmt: skip
        newest = sorted(self.decisions.values(), key=lambda one: -one["number"])[:100]
        items: dict[str, dict[str, Json]] = {
            "gpus": {gpu.id: self._shown_gpu(gpu) for gpu in self.gpus.values()},
            "functions": in_order(
                {f"{one.name}.{NAMESPACE}": self._shown(one) for one in self.functions}
            ),
            "decisions": {one["request"]: dict(one) for one in newest},
        }
        return PageState(whole, items)

    async def point(self) -> Point:
        totals = self._totals()
        return {
            "throughput": totals["rate"],
            "hit_ratio": totals["hit_ratio"],
            "p50": totals["p50_s"],
            "p95": totals["p95_s"],
            "p99": totals["p99_s"],
            "queue": float(len(self.queue)),
        }

    def past(self, points: int) -> list[Point]:
        """Invented points of the minutes before, for the charts."""
        found: list[Point] = []
        for number in range(points):
            swell = 1.0 + 0.3 * math.sin(number / 11) + self._random.uniform(-0.08, 0.08)
            found.append({
                "throughput": round(self.rate * swell, 2),
                "hit_ratio": round(min(1.0, 0.97 - 0.12 * swell * self._random.random()), 4),
                "p50": round(0.32 * swell, 4),
                "p95": round(1.3 * swell * swell, 4),
                "p99": round(2.4 * swell * swell * self._random.uniform(0.9, 1.2), 4),
                "queue": float(int(4 * max(0.0, swell - 1.0) * len(self.gpus))),
            })  # fmt: skip
        return found

    async def decision(self, request: str) -> Json:
        found = self.decisions.get(request)
        if found is None:
            raise OwnStatus(404, f"there is no request among the latest: {request!r}")
        return explained(found, list(self.gpus), self._random, self._at_s)

    async def model(self, model: str) -> Json:
        return measured(self._function(model))

    async def set_policy(self, name: str, parameters: Mapping[str, float]) -> None:
        known = {policy["name"]: policy for policy in POLICIES}
        if name not in known:
            raise OwnStatus(422, f"there is no policy {name!r}; there are {', '.join(known)}")
        defaults = {each["name"]: each["default"] for each in known[name]["parameters"]}
        wrong = set(parameters) - set(defaults)
        if wrong:
            raise OwnStatus(422, f"{name} has no parameter {', '.join(sorted(wrong))}")
        self.policy = {"name": name, "parameters": defaults | dict(parameters)}

    async def order(self, model: str, verb: str, gpu: str | None) -> None:
        function = self._function(model)
        if gpu is not None and gpu not in self.gpus:
            raise OwnStatus(404, f"there is no GPU {gpu!r}")
        self.ordered.append((model, verb, gpu))
        meant = [one for one in self.gpus.values() if gpu in {None, one.id}]
        if verb == "prefetch":
            free = [one for one in meant if model not in one.residents]
            if not free:
                raise OwnStatus(409, f"{model} is there already")
            self._make_room(free[0], function)
            free[0].residents[model] = GeneratedResident(
                function, self._at_s, 0, False, self._at_s + 2
            )
            return
        holders = [one for one in meant if model in one.residents]
        if not holders:
            raise OwnStatus(409, f"{model} is on no GPU")
        self._obey(holders, function, verb)

    async def replay(self, letter: int) -> None:
        await self.discard(letter)
        self._arrive(self._random.choice(self.functions), self._at_s)

    async def discard(self, letter: int) -> None:
        if self.letters.pop(letter, None) is None:
            raise UnknownJob(letter)

    # -- how it goes on ---------------------------------------------------------------------------

    def _function(self, model: str) -> GeneratedFunction:
        for each in self.functions:
            if each.model == model:
                return each
        raise OwnStatus(404, f"there is no model {model!r}")

    def _obey(self, holders: list[GeneratedGpu], function: GeneratedFunction, verb: str) -> None:
        for gpu in holders:
            if verb != "evict":
                gpu.residents[function.model].pinned = verb == "pin"
                continue
            if gpu.running is not None and gpu.running.function is function:
                if len(holders) == 1:
                    raise OwnStatus(409, f"{function.model} is in use on {gpu.id}")
                continue
            del gpu.residents[function.model]
            self.counts["evictions"] += 1

    def _go_on(self, now_s: float) -> None:
        """Some requests arrive, some end, some begin."""
        span_s = min(5.0, now_s - self._at_s)
        self._at_s = now_s
        for _ in range(poisson(self._random, self.rate * span_s)):
            self._arrive(self._popular(), now_s - self._random.random() * span_s)
        for gpu in self.gpus.values():
            if gpu.running is not None and gpu.running.end_s <= now_s:
                self._end(gpu, gpu.running)
        self._place(now_s)

    def _arrive(self, function: GeneratedFunction, at_s: float) -> None:
        self.counts["requests"] += 1
        self.called[function.name].in_flight += 1
        self.queue.append((f"{self._random.getrandbits(64):016x}", function, at_s))

    def _place(self, now_s: float) -> None:
        """First those whose model an idle GPU has, then the others in order of arrival."""
        for request, function, arrived_s in list(self.queue):
            idle = [gpu for gpu in self.gpus.values() if gpu.running is None and not gpu.state]
            if not idle:
                return
            holder = next((gpu for gpu in idle if function.model in gpu.residents), None)
            elsewhere = any(function.model in gpu.residents for gpu in self.gpus.values())
            if holder is None and elsewhere and now_s - arrived_s < _WAIT_FOR_HOLDER_S:
                continue
            gpu = holder or self._random.choice(idle)
            self.queue.remove((request, function, arrived_s))
            self._begin(gpu, request, function, arrived_s, elsewhere=elsewhere)

    def _begin(
        self,
        gpu: GeneratedGpu,
        request: str,
        function: GeneratedFunction,
        arrived_s: float,
        *,
        elsewhere: bool,
    ) -> None:
        hit = function.model in gpu.residents
        load_s = 0.0 if hit else function.load_s * self._random.uniform(0.9, 1.3)
        run_s = function.run_s * self._random.uniform(0.8, 1.4)
        now_s = self._at_s
        self.counts["hits" if hit else "misses"] += 1
        self.counts["false_misses"] += not hit and elsewhere
        if not hit:
            self._make_room(gpu, function)
            gpu.residents[function.model] = GeneratedResident(
                function, now_s, 0, False, now_s + load_s
            )
        held = gpu.residents.pop(function.model)
        held.used_s, held.uses = now_s, held.uses + 1
        gpu.residents[function.model] = held
        number = len(self.decisions) + 1
        gpu.running = GeneratedRun(
            request, function, arrived_s, now_s, now_s + load_s + run_s, load_s, hit, number
        )
        self.decisions[request] = {
            "request": request,
            "number": number,
            "function": function.name,
            "namespace": NAMESPACE,
            "models": [function.model],
            "at": now_s,
            "gpu": gpu.id,
            "hit": hit,
            "false_miss": not hit and elsewhere,
            "waited_s": now_s - arrived_s,
            "load_s": load_s,
            "run_s": None,
            "rule": "idle holder" if hit else "least used idle slot",
            "outcome": None,
        }

    def _end(self, gpu: GeneratedGpu, running: GeneratedRun) -> None:
        called = self.called[running.function.name]
        called.calls += 1
        called.in_flight -= 1
        called.gpu_s += running.end_s - running.since_s
        failed = self._random.random() < _FAILING_SHARE
        called.errors += failed
        decision = self.decisions[running.request]
        decision["run_s"] = running.end_s - running.since_s - running.load_s
        decision["outcome"] = "failed" if failed else "completed"
        gpu.running = None

    def _make_room(self, gpu: GeneratedGpu, function: GeneratedFunction) -> None:
        for model, held in list(gpu.residents.items()):
            if gpu.used_bytes + function.bytes <= gpu.bytes:
                return
            if not held.pinned and (gpu.running is None or gpu.running.function.model != model):
                del gpu.residents[model]
                self.counts["evictions"] += 1

    # -- what is shown ----------------------------------------------------------------------------

    def _shown_gpu(self, gpu: GeneratedGpu) -> Json:
        running = gpu.running
        queue = [
            {"request": request, "function": function.name, "models": [function.model]}
            for request, function, _ in self.queue[:60]
            if hash(request) % len(self.gpus) == int(gpu.id.rpartition(":")[2])
        ][:3]
        leases = []
        if running is not None:
            leases.append({
                "request": running.request, "function": running.function.name,
                "models": [running.function.model], "since_s": running.since_s,
                "expected_end_s": running.end_s, "slots": 2, "batch": 2, "vcpus": 3,
            })  # fmt: skip
        return {
            "id": gpu.id,
            "node": gpu.node,
            "kind": gpu.kind,
            "total_bytes": gpu.bytes,
            "used_bytes": gpu.used_bytes,
            "free_bytes": gpu.bytes - gpu.used_bytes,
            "withheld_bytes": 0,
            "stuck": [],
            "state": gpu.state or ("busy" if running else "idle"),
            "utilisation": None,
            "queue_length": len(queue),
            "queue": queue,
            "leases": leases,
            "residents": [self._resident(held, running) for held in gpu.residents.values()],
        }

    def _resident(self, held: GeneratedResident, running: GeneratedRun | None) -> Json:
        return {
            "model": held.function.model,
            "label": held.function.name,
            "bytes": held.function.bytes,
            "busy": running is not None and running.function is held.function,
            "loading": held.loaded_s > self._at_s,
            "pinned": held.pinned,
            "last_used_s": held.used_s,
            "uses": held.uses,
        }

    def _shown(self, function: GeneratedFunction) -> Json:
        called = self.called[function.name]
        return {
            "id": f"{function.name}.{NAMESPACE}",
            "name": function.name,
            "namespace": NAMESPACE,
            "gpu": True,
            "models": [function.model],
            "replicas": 1 + called.in_flight // 4,
            "trouble": "",
            "late": False,
            "part_trouble": "",
            "dying": "",
            "template_trouble": "",
            "log_command": f"faas-cli logs {function.name}",
            "wanted": 1 + called.in_flight // 3,
            "in_flight": called.in_flight,
            "waiting": 0,
            "calls": called.calls,
            "errors": called.errors,
            "rate": round(called.calls / (self._at_s - self._began_s + 30), 3),
            "p95_s": round(function.run_s * 2.2, 4) if called.calls else None,
            "gpu_seconds": round(called.gpu_s, 2),
            "gpu_gib_seconds": round(3 * called.gpu_s, 1),
            "cost": f"{called.gpu_s / 1000:.4f} EUR",
            "image": function.image,
        }

    def _queue(self) -> Json:
        by_function: dict[str, int] = {}
        for _, function, _ in self.queue:
            by_function[function.name] = by_function.get(function.name, 0) + 1
        most = sorted(by_function.items(), key=lambda pair: (-pair[1], pair[0]))
        return {
            "length": len(self.queue),
            "local": 0,
            "head": [
                {
                    "request": request, "function": function.name, "models": [function.model],
                    "waited_s": round(self._at_s - arrived_s, 3), "visits": place // 4,
                }
                for place, (request, function, arrived_s) in enumerate(self.queue[:50])
            ],
            "by_function": [{"function": name, "length": count} for name, count in most],
        }  # fmt: skip

    def _totals(self) -> dict[str, Any]:
        placed = self.counts["hits"] + self.counts["misses"]
        return {
            **self.counts,
            "failed": sum(called.errors for called in self.called.values()),
            "rate": round(self.rate * self._random.uniform(0.9, 1.1), 2),
            "hit_ratio": round(self.counts["hits"] / placed, 4) if placed else None,
            "p50_s": round(0.4 * self._random.uniform(0.9, 1.1), 4),
            "p95_s": round(1.9 * self._random.uniform(0.9, 1.2), 4),
            "p99_s": round(3.8 * self._random.uniform(0.9, 1.3), 4),
        }

    def _letters(self) -> Json:
        return {"count": len(self.letters), "why": "", "items": list(self.letters.values())}

    def _alerts(self) -> list[Json]:
        found: list[Json] = [
            {"level": "warning", "code": "gpu-silent", "text": f"{gpu.id} is silent",
             "about": gpu.id, "what_to_do": f"look at the GPU manager of {gpu.node}"}
            for gpu in self.gpus.values() if gpu.state == "silent"
        ]  # fmt: skip
        if self.letters:
            found.append({
                "level": "warning", "code": "dead-letters", "about": "dead_letters",
                "text": f"{len(self.letters)} async calls are not tried any more",
                "what_to_do": "replay or delete them below",
            })  # fmt: skip
        return found

    def _popular(self) -> GeneratedFunction:
        """A few are called often, most of them seldom."""
        return self.functions[min(len(self.functions), int(self._random.paretovariate(0.8))) - 1]


def empty() -> GeneratedCluster:
    """A cluster without GPUs, functions or calls."""
    cluster = GeneratedCluster(1, 1)
    cluster.gpus.clear()
    cluster.functions.clear()
    cluster.queue.clear()
    cluster.decisions.clear()
    cluster.letters.clear()
    cluster.rate = 0.0
    cluster.counts = dict.fromkeys(cluster.counts, 0)
    return cluster
