"""Deployments, updates, scaling, policies, quotas and evictions in an order that a seed decides."""

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from random import Random
from typing import NamedTuple, Self

from bench.gateway import bench_functions
from bench.measure.whole_stack import CallFailed, StackNotReady, WholeStack
from gpufaas.errors import CommandError
from gpufaas.remote.scheduler_api import in_path
from scheduler import policies

# Few names and few weights: what is remembered of each must not add up.
_EXTRAS, _SEEDS, _MOST_REPLICAS, _CALLS = 3, 4, 2, 5
_TENANT = "soak"
_OWNERS = ("openfaas-fn", "openfaas-fn/classify", "openfaas-fn/pipeline", _TENANT)
_TERMS: tuple[Mapping[str, object], ...] = (
    {"weight": 3.0},
    {"priority": 2},
    {"leases": 2},
    {"gpu_s": 30.0, "window_s": 60.0},
    {"waiting": 20, "weight": 0.5},
)
# Between two orders, and between two steps of a function's life.
_PAUSE_S, _LIFE_PAUSE_S = 3.0, 1.0
_ACCEPTED = frozenset({200, 202})
_BUSY = 429
_MOST_FAILURES = 50


class ChangeCounts(NamedTuple):
    """How often each change was made, how often one was declined, and what should not be."""

    made: Mapping[str, int]
    declined: Mapping[str, int]
    failures: list[str]


class RandomChanges:
    """Changes from two threads until the context ends: functions' lives, and operators' orders."""

    def __init__(self, running: WholeStack, seed: int) -> None:
        self._running = running
        self._made: Counter[str] = Counter()
        self._declined: Counter[str] = Counter()
        self._failures: list[str] = []
        self._stopping = threading.Event()
        self._lives = ExtraFunctions(running, Random(seed))
        self._orders = OperatorOrders(running, Random(seed + 1))
        self._threads = [
            threading.Thread(target=self._repeat, args=(each.change, pause_s, Random(seed + 2)))
            for each, pause_s in ((self._lives, _LIFE_PAUSE_S), (self._orders, _PAUSE_S))
        ]

    def __enter__(self) -> Self:
        self._running.add_namespace(_TENANT)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def undo(self) -> None:
        """Remove the functions and the terms that there still are; the policy is as at first."""
        self._lives.remove_all()
        self._orders.restore()

    def counts(self) -> ChangeCounts:
        """What has happened so far."""
        return ChangeCounts(dict(self._made), dict(self._declined), list(self._failures))

    def _repeat(self, change: Callable[[], str], pause_s: float, chance: Random) -> None:
        while not self._stopping.wait(chance.expovariate(1.0 / pause_s)):
            try:
                self._made[change()] += 1
            except _Declined as declined:
                self._declined[str(declined)] += 1
            except (StackNotReady, CommandError, OSError) as error:
                if len(self._failures) < _MOST_FAILURES:
                    self._failures.append(f"{type(error).__name__}: {error}")


class _Declined(Exception):
    """An order that may be declined, and was: a model in use does not leave, for example."""


class ExtraFunctions:
    """Functions beside the examples, each deployed, called, updated, scaled and removed."""

    def __init__(self, running: WholeStack, chance: Random) -> None:
        self._running = running
        self._chance = chance
        self._present: dict[str, str] = {}  # the functions, with their namespaces

    def change(self) -> str:
        """One step in the life of one of them; its name."""
        name = f"extra-{self._chance.randrange(_EXTRAS)}"
        if name not in self._present:
            return self._deploy(name)
        step = self._chance.choice((self._update, self._scale, self._call, self._remove))
        return step(name)

    def remove_all(self) -> None:
        """Remove those that are there."""
        for name in list(self._present):
            self._remove(name)

    def _deploy(self, name: str) -> str:
        self._present[name] = self._chance.choice(("", _TENANT))
        try:
            self._running.deploy(self._deployment(name))
        except StackNotReady:
            del self._present[name]
            raise
        self._running.ready(self._called(name))
        self._calls(name)
        return "deploy"

    def _update(self, name: str) -> str:
        self._order("PUT", "/system/functions", self._deployment(name))
        self._calls(name)
        return "update"

    def _scale(self, name: str) -> str:
        replicas = self._chance.randint(0, _MOST_REPLICAS)
        wanted = {"serviceName": name, "namespace": self._present[name], "replicas": replicas}
        self._order("POST", f"/system/scale-function/{name}", wanted)
        self._calls(name)  # one without an instance wakes
        return f"scale to {replicas}"

    def _call(self, name: str) -> str:
        self._calls(name)
        return "call"

    def _remove(self, name: str) -> str:
        wanted = {"functionName": name, "namespace": self._present.pop(name)}
        self._order("DELETE", "/system/functions", wanted)
        return "remove"

    def _calls(self, name: str) -> None:
        """Some calls; a quota may refuse one."""
        try:
            for _ in range(_CALLS):
                self._running.call(self._called(name), b"")
        except CallFailed as failure:
            if failure.status != _BUSY:
                raise
            raise _Declined("call: 429") from failure

    def _order(self, method: str, path: str, content: Mapping[str, object]) -> None:
        status, body = self._running.system(method, path, content)
        if status not in _ACCEPTED:
            raise StackNotReady(f"{method} {path}: {status} {body.decode(errors='replace')}")

    def _deployment(self, name: str) -> Mapping[str, object]:
        """A function with or without a GPU; `SEED` chooses the weights, and is another version."""
        seed = str(self._chance.randrange(_SEEDS))
        plain = bench_functions.plain() | {"envVars": {"SEED": seed}}
        model = bench_functions.model(int(seed))
        chosen = self._chance.choice((plain, model))
        labels = {"com.openfaas.scale.max": str(_MOST_REPLICAS)}
        namespace = self._present[name]
        return {**chosen, "service": name, "labels": labels, "namespace": namespace}

    def _called(self, name: str) -> str:
        namespace = self._present[name]
        return f"{name}.{namespace}" if namespace else name


class OperatorOrders:
    """What operators do meanwhile: policies, quotas, models that come and go."""

    def __init__(self, running: WholeStack, chance: Random) -> None:
        self._running = running
        self._chance = chance
        self._policy = str(running.scheduler.get("/policy")["policy"])
        self._owners: set[str] = set()
        self._pinned = ""

    def change(self) -> str:
        """One order; its name."""
        orders = (self._set_policy, self._set_terms, self._remove_terms, self._evict, self._evict)
        return self._chance.choice((*orders, self._prefetch, self._pin))()

    def restore(self) -> None:
        """No terms, no pin, and the policy of the beginning."""
        while self._owners:
            self._remove_terms()
        with suppress(_Declined):  # the model has gone
            self._unpin()
        self._running.set_policy(self._policy)

    def _set_policy(self) -> str:
        self._running.set_policy(self._chance.choice(policies.available()))
        return "policy"

    def _set_terms(self) -> str:
        owner = self._chance.choice(_OWNERS)
        self._running.administrator.put(f"/quotas/{owner}", self._chance.choice(_TERMS))
        self._owners.add(owner)
        return "quota"

    def _remove_terms(self) -> str:
        if not self._owners:
            raise _Declined("no quota to remove")
        owner = self._chance.choice(sorted(self._owners))
        self._owners.discard(owner)
        self._running.administrator.delete(f"/quotas/{owner}")
        return "quota removed"

    def _evict(self) -> str:
        return self._order_model("evict", self._residents())

    def _prefetch(self) -> str:
        known = sorted(model["model"] for model in self._running.scheduler.get("/models"))
        return self._order_model("prefetch", known)

    def _pin(self) -> str:
        """Pin one, and let the last one go."""
        self._unpin()
        return self._order_model("pin", self._residents())

    def _unpin(self) -> None:
        model, self._pinned = self._pinned, ""
        if model:
            self._obey(model, "unpin")

    def _order_model(self, verb: str, models: list[str]) -> str:
        if not models:
            raise _Declined(f"{verb}: no model")
        model = self._chance.choice(models)
        self._obey(model, verb)
        if verb == "pin":
            self._pinned = model
        return verb

    def _obey(self, model: str, verb: str) -> None:
        """A model may be in use, or have gone since it was shown."""
        try:
            self._running.administrator.post(f"/models/{in_path(model)}/{verb}")
        except CommandError as error:
            raise _Declined(f"{verb}: {_kind(error)}") from error

    def _residents(self) -> list[str]:
        gpus = self._running.cluster()["gpus"]
        return sorted({resident["model"] for gpu in gpus for resident in gpu["residents"]})


def _kind(error: CommandError) -> str:
    """An error's text without the names in it."""
    return " ".join(word for word in str(error).split() if not any(map(str.isdigit, word)))[:80]
