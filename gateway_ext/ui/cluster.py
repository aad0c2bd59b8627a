"""The cluster as it is: what the scheduler tells, joined with what the gateway knows itself."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

from gateway_ext.errors import BadRequest, Declined
from gateway_ext.meters import Meters
from gateway_ext.table import Function
from gateway_ext.ui.attention import alerts
from gateway_ext.ui.functions import FunctionRows
from gateway_ext.ui.letters import Letters
from gateway_ext.ui.model import SERIES, Json, Look, Point
from gateway_ext.ui.words import full_name, natural, short_model, shown_function
from scheduler import errors
from scheduler.api import SchedulerError

_DECISIONS = 100
_MOST_LABELS = 10_000
_ORDER_S = 10.0
# What asking costs both sides beside that: HTTP, reading the answer. Measured: bench.page.
ASKING_S = 0.0025
_NO_TOTALS: Json = {
    **dict.fromkeys(("requests", "hits", "misses", "false_misses", "evictions", "failed"), 0),
    **dict.fromkeys(("rate", "hit_ratio", "p50_s", "p95_s", "p99_s")),
}
_NO_QUEUE: Json = {"length": 0, "local": 0, "head": [], "by_function": []}
_NOT_FAILED = frozenset({"completed", "cancelled"})


class Console(Protocol):
    """Who is asked: `scheduler.console.Console`, with an administrator's token."""

    @property
    def url(self) -> str:
        """Of the scheduler that led last."""
        ...

    async def look(self, mark: str) -> Mapping[str, Any]:
        """Everything, or what is new since the look of that mark."""
        ...

    async def point(self) -> Mapping[str, Any]:
        """The last seconds, as charts show them."""
        ...

    async def policies(self) -> Sequence[Mapping[str, Any]]:
        """Every policy there is."""
        ...

    async def explain(self, request: str) -> Mapping[str, Any]:
        """Why a request went where it went."""
        ...

    async def set_policy(self, name: str, parameters: Mapping[str, float]) -> None:
        """Place by this policy from now on."""
        ...

    async def order(self, model: str, verb: str, gpu: str | None) -> None:
        """Pin, unpin, prefetch or evict a model."""
        ...


class Cluster:
    """Is a `Source`. One look at a time; what the scheduler does not tell stays as it was.

    A scheduler that says nothing `within_s` does not answer: it may be frozen.
    """

    def __init__(
        self,
        console: Console,
        functions: Iterable[Function],
        meters: Meters,
        letters: Letters,
        *,
        within_s: float = 3.0,
    ) -> None:
        self._console = console
        self._letters = letters
        self._within_s = within_s
        self._functions = FunctionRows(functions, meters)
        self._mark = ""
        self._term = 0
        self._labels: dict[str, str] = {}
        self._nameless: set[str] = set()
        self._seen: Mapping[str, Json] = {}
        self._gpus: dict[str, Json] = {}
        self._decisions: dict[str, Json] = {}
        self._gpu_seconds: dict[str, float] = {}
        self._described: Sequence[Mapping[str, Any]] = ()
        self._whole: dict[str, Any] = {
            "scheduler": self._scheduler({}, "it was not asked yet"),
            "policy": {"name": "", "parameters": {}},
            "policies": [],
            "queue": _NO_QUEUE,
            "totals": _NO_TOTALS,
        }

    async def look(self) -> Look:
        letters = await self._letters.look()
        said, why = await self._ask()  # last: what is new is told once, so nothing may come between
        began_s = time.thread_time()
        functions = self._functions.look(self._take_gpu_seconds(said), time.monotonic())
        self._learn_labels(functions)
        whole = self._taken_in(said) if said else dict(self._whole)
        self._name_models()
        whole["scheduler"] = self._scheduler(said, why)
        whole["dead_letters"] = letters
        self._whole = whole
        found = alerts(whole, self._gpus.values(), functions.values())
        items = {"gpus": self._gpus, "functions": functions, "decisions": self._decisions}
        spent_s = time.thread_time() - began_s + float(said.get("took_s", 0.0))
        return Look({**whole, "alerts": found}, items, spent_s + ASKING_S)

    async def point(self) -> Point:
        try:
            async with asyncio.timeout(self._within_s):
                said = await self._console.point()
        except (SchedulerError, TimeoutError):  # the next look says that it is away
            return dict.fromkeys(SERIES)
        return {kind: said.get(kind) for kind in SERIES}

    # -- what is ordered --------------------------------------------------------------------------

    async def decision(self, request: str) -> Json:
        async with self._declined(404):
            found = dict(await self._console.explain(request))
        found["labels"] = {model: self._label(model) for model in found["models"]}
        return found

    async def set_policy(self, name: str, parameters: Mapping[str, float]) -> None:
        async with self._declined(422):
            await self._console.set_policy(name, parameters)

    async def order(self, model: str, verb: str, gpu: str | None) -> None:
        async with self._declined(409):
            await self._console.order(model, verb, gpu)

    async def replay(self, letter: int) -> None:
        await self._letters.replay(letter)

    async def discard(self, letter: int) -> None:
        await self._letters.discard(letter)

    @asynccontextmanager
    async def _declined(self, refused: int) -> AsyncIterator[None]:
        """The scheduler's errors as the page is told them; what it refuses has this status."""
        try:
            async with asyncio.timeout(_ORDER_S):
                yield
        except TimeoutError as error:
            raise Declined(503, f"{self._console.url} does not answer") from error
        except errors.NotAllowed as error:
            why = f"the scheduler does not let this gateway do that: {error}"
            raise Declined(502, why) from error
        except (errors.Unreachable, errors.NotLeading) as error:
            raise Declined(503, str(error)) from error
        except errors.BadRequest as error:
            raise BadRequest(str(error)) from error
        except SchedulerError as error:
            raise Declined(refused, str(error)) from error

    # -- what the scheduler tells -----------------------------------------------------------------

    async def _ask(self) -> tuple[Mapping[str, Any], str]:
        """What is new; else nothing, and why."""
        try:
            async with asyncio.timeout(self._within_s):
                said = await self._console.look(self._mark)
                if said["term"] != self._term or not self._described:
                    self._described = await self._console.policies()
                    self._term = said["term"]
        except SchedulerError as error:
            return {}, str(error)
        except TimeoutError:
            return {}, f"{self._console.url} has not answered for {self._within_s:g} s"
        self._mark = said["mark"]
        return said, ""

    def _scheduler(self, said: Mapping[str, Any], why: str) -> Json:
        before = self._whole["scheduler"] if not said and self._mark else {}
        return {
            "url": self._console.url,
            "leader": said.get("name", before.get("leader", "")),
            "term": said.get("term", before.get("term", 0)),
            "etcd": said.get("store", before.get("etcd", "")),
            "skew_s": round(said["now"] - time.time()) if said else before.get("skew_s", 0),
            "ok": not why,
            "why": why,
        }

    def _taken_in(self, said: Mapping[str, Any]) -> dict[str, Any]:
        self._take_decisions(said)
        self._take_gpus(said)
        queue, name = said["queue"], said["policy"]
        described = {each["name"]: each["parameters"] for each in self._described}
        return {
            "policy": {
                "name": name,
                "parameters": {**described.get(name, {}), **said["parameters"]},
            },
            "policies": [self._policy(each, said) for each in self._described],
            "queue": {
                **queue,
                "head": [_named(one) for one in queue["head"]],
                "by_function": [_named(one) for one in queue["by_function"]],
            },
            "totals": _totals(said["totals"]),
        }

    def _policy(self, described: Mapping[str, Any], said: Mapping[str, Any]) -> Json:
        in_force = said["parameters"] if described["name"] == said["policy"] else {}
        return {
            "name": described["name"],
            "meaning": described["summary"],
            "rule": described["rule"],
            "parameters": [
                {
                    "name": name,
                    "type": "int" if isinstance(default, int) else "float",
                    "value": in_force.get(name, default),
                    "default": default,
                    "meaning": described.get("meanings", {}).get(name, ""),
                }
                for name, default in described["parameters"].items()
            ],
        }

    def _take_gpus(self, said: Mapping[str, Any]) -> None:
        gpus = {} if said["whole"] else dict(self._gpus)
        count = len(gpus)
        for gone in said["gpus_gone"]:
            gpus.pop(gone, None)
        for gpu in said["gpus"]:
            gpus[gpu["id"]] = self._gpu(gpu)
        if len(gpus) != count or said["whole"]:
            gpus = {gpu_id: gpus[gpu_id] for gpu_id in sorted(gpus, key=natural)}
        self._gpus = gpus

    def _gpu(self, gpu: dict[str, Any]) -> Json:
        gpu["queue"] = [_named(one) for one in gpu["queue"]]
        gpu["leases"] = [_named(one) for one in gpu["leases"]]
        for lease in gpu["leases"]:
            self._learn(lease["models"], lease["function"])
        for resident in gpu["residents"]:
            model = resident["model"]
            resident["label"] = self._label(model)
            if model not in self._labels:
                self._nameless.add(model)
        return gpu

    def _take_decisions(self, said: Mapping[str, Any]) -> None:
        rows = {} if said["whole"] else dict(self._decisions)
        for row in said["decisions"]:
            namespace = row["function"].partition("/")[0]
            named = {**_named(row), "namespace": namespace}
            rows[row["request"]] = named
            self._learn(row["models"], named["function"])
        newest = sorted(rows.values(), key=lambda row: -row["number"])[:_DECISIONS]
        self._decisions = {row["request"]: row for row in newest}

    def _take_gpu_seconds(self, said: Mapping[str, Any]) -> Mapping[str, float]:
        if said.get("whole"):
            self._gpu_seconds.clear()
        for function, held_s in said.get("gpu_seconds", {}).items():
            self._gpu_seconds[full_name(function)] = held_s
        return self._gpu_seconds

    # -- what models are called -------------------------------------------------------------------

    def _learn_labels(self, functions: Mapping[str, Json]) -> None:
        """Of functions that are not as they were at the last look."""
        before, self._seen = self._seen, functions
        for function_id, function in functions.items():
            if function["models"] and before.get(function_id) is not function:
                namespace, name = function["namespace"], function["name"]
                self._learn(function["models"], shown_function(f"{namespace}/{name}"))

    def _learn(self, models: Iterable[str], function: str | None) -> None:
        """The first function that was seen to use a model names it; it must not flicker."""
        if function is None:
            return
        if len(self._labels) > _MOST_LABELS:
            self._labels.clear()
        for model in models:
            self._labels.setdefault(model, function)

    def _name_models(self) -> None:
        """Models that were shown before it was known who uses them."""
        named = self._nameless & self._labels.keys()
        if not named:
            return
        self._nameless -= named
        for gpu_id, gpu in self._gpus.items():
            if any(resident["model"] in named for resident in gpu["residents"]):
                residents = [
                    {**resident, "label": self._label(resident["model"])}
                    for resident in gpu["residents"]
                ]
                self._gpus = {**self._gpus, gpu_id: {**gpu, "residents": residents}}

    def _label(self, model: str) -> str:
        return self._labels.get(model) or short_model(model)


def _named(item: Mapping[str, Any]) -> dict[str, Any]:
    """With the function as people call it."""
    function = item["function"]
    return {**item, "function": None if function is None else shown_function(function)}


def _totals(said: Mapping[str, Any]) -> Json:
    ended: Mapping[str, int] = said["ended"]
    failed = sum(count for outcome, count in ended.items() if outcome not in _NOT_FAILED)
    return {**said, "failed": failed}
