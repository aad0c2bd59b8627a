"""The page's state: the scheduler's view, joined with the gateway's functions."""

import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import KW_ONLY, dataclass, field
from itertools import zip_longest
from typing import Any, NamedTuple

from common.time_limits import time_limit
from gateway_ext.calls.function_table import Function
from gateway_ext.errors import BadRequest, OwnStatus
from gateway_ext.metrics import GatewayMeters
from gateway_ext.ui.rows import Billed, DeadLetterRows, FunctionRows
from gateway_ext.ui.shown_names import ModelLabels, full_name, in_order, short_model, shown_function
from gateway_ext.ui.state import SERIES, Json, PageState, Point
from scheduler.api import SchedulerError
from scheduler.client.operator_client import OperatorClient
from scheduler.model import errors

_DECISIONS = 100
# Functions that the scheduler forgets are not named in its changes: from so many on all is read
# anew.
_MOST_FUNCTIONS = 10_000
_ORDER_S = 10.0
# The cost of a look for both sides beside that: HTTP, reading the answer. Measured: bench.page.
ASKING_S = 0.0025
_NO_TOTALS: Json = {
    **dict.fromkeys(("requests", "hits", "misses", "false_misses", "evictions", "failed"), 0),
    **dict.fromkeys(("rate", "hit_ratio", "p50_s", "p95_s", "p99_s")),
}
_NO_QUEUE: Json = {"length": 0, "local": 0, "head": [], "by_function": []}
_NO_OWNERS: Json = {"count": 0, "rows": []}
_NOT_FAILED = frozenset({"completed", "cancelled"})


@dataclass(eq=False)
class PageSource:
    """The cluster, as the page sees it; every failure is raised as a GatewayError.

    Without the scheduler its part stays as it was. One that does not answer `within_s` counts as
    away: it may be frozen.
    """

    console: OperatorClient  # has an administrator's token
    functions: Iterable[Function]
    meters: GatewayMeters
    letters: DeadLetterRows
    # What features add.
    sections: Mapping[str, Callable[[], Sequence[Json]]] = field(default_factory=dict)
    more_alerts: Sequence[Callable[[], Iterable[Json]]] = ()
    _: KW_ONLY
    within_s: float = 3.0

    def __post_init__(self) -> None:
        self._rows = FunctionRows(self.functions, self.meters)
        self._mark = ""
        self._term = 0
        self._labels = ModelLabels()
        self._gpus: dict[str, Json] = {}
        self._decisions: dict[str, Json] = {}
        self._gpu_seconds: dict[str, float] = {}
        self._billed: dict[str, Billed] = {}
        self._described: Sequence[Mapping[str, Any]] = ()
        self._whole: dict[str, Any] = {
            "scheduler": self._scheduler({}, "it was not asked yet"),
            "policy": {"name": "", "parameters": {}},
            "policies": [],
            "queue": _NO_QUEUE,
            "totals": _NO_TOTALS,
            "owners": _NO_OWNERS,
        }

    async def look(self) -> PageState:
        """The state now, one look at a time; an unreachable part is marked in it, not raised."""
        letters = await self.letters.look()
        view, why = await self._ask()  # last: the scheduler sends each change once
        began_s = time.thread_time()
        self._take_figures(view)
        functions = self._rows.look(self._gpu_seconds, self._billed, time.monotonic())
        self._labels.see(functions)
        whole = self._taken_in(view) if view else dict(self._whole)
        self._gpus = self._labels.relabelled(self._gpus)
        whole["scheduler"] = self._scheduler(view, why)
        whole["dead_letters"] = letters
        whole |= {name: section() for name, section in self.sections.items()}
        self._whole = whole
        more = [alert for told in self.more_alerts for alert in told()]
        shown_alerts = alerts(whole, self._gpus.values(), functions.values(), more)
        items = {"gpus": self._gpus, "functions": functions, "decisions": self._decisions}
        spent_s = time.thread_time() - began_s + float(view.get("took_s", 0.0))
        return PageState({**whole, "alerts": shown_alerts}, items, spent_s + ASKING_S)

    async def point(self) -> Point:
        """A point of the charts: figures of the last seconds; costs far less than a look."""
        try:
            async with time_limit(self.within_s):
                view = await self.console.point()
        except (SchedulerError, TimeoutError):  # the next look reports the failure
            return dict.fromkeys(SERIES)
        return {kind: view.get(kind) for kind in SERIES}

    # -- orders -----------------------------------------------------------------------------------

    async def decision(self, request: str) -> Json:
        """Why a request was placed where it was, and its outcome."""
        async with self._declined(404):
            explained = dict(await self.console.explain(request))
        explained["labels"] = {model: self._labels.of(model) for model in explained["models"]}
        return explained

    async def model(self, model: str) -> Json:
        """What a model needs, and its measured times."""
        async with self._declined(404):
            return await self.console.model(model)

    async def set_policy(self, name: str, parameters: Mapping[str, float]) -> None:
        async with self._declined(422):
            await self.console.set_policy(name, parameters)

    async def order(self, model: str, verb: str, gpu: str | None) -> None:
        """Pin, unpin, prefetch or evict a model: on one GPU, or wherever that makes sense."""
        async with self._declined(409):
            await self.console.order(model, verb, gpu)

    async def replay(self, letter: int) -> None:
        await self.letters.replay(letter)

    async def discard(self, letter: int) -> None:
        await self.letters.discard(letter)

    @asynccontextmanager
    async def _declined(self, refused: int) -> AsyncIterator[None]:
        """Raise the scheduler's errors as the page's; a refusal gets this status."""
        try:
            async with time_limit(_ORDER_S):
                yield
        except TimeoutError as error:
            raise OwnStatus(503, f"{self.console.url} does not answer") from error
        except errors.CallerNotAllowed as error:
            why = f"the scheduler does not let this gateway do that: {error}"
            raise OwnStatus(502, why) from error
        except (errors.SchedulerUnreachable, errors.NotLeading) as error:
            raise OwnStatus(503, str(error)) from error
        except errors.MalformedRequest as error:
            raise BadRequest(str(error)) from error
        except SchedulerError as error:
            raise OwnStatus(refused, str(error)) from error

    # -- the scheduler's view ---------------------------------------------------------------------

    async def _ask(self) -> tuple[Mapping[str, Any], str]:
        """The changes since the last look; or no changes, and the reason."""
        try:
            async with time_limit(self.within_s):
                view = await self.console.look(self._mark)
                if view["term"] != self._term or not self._described:
                    self._described = await self.console.policies()
                    self._term = view["term"]
        except SchedulerError as error:
            return {}, str(error)
        except TimeoutError:
            return {}, f"{self.console.url} has not answered for {self.within_s:g} s"
        self._mark = view["mark"]
        return view, ""

    def _scheduler(self, view: Mapping[str, Any], why: str) -> Json:
        before = self._whole["scheduler"] if not view and self._mark else {}
        return {
            "url": self.console.url,
            "leader": view.get("name", before.get("leader", "")),
            "term": view.get("term", before.get("term", 0)),
            "etcd": view.get("store", before.get("etcd", "")),
            "skew_s": round(view["now"] - time.time()) if view else before.get("skew_s", 0),
            "ok": not why,
            "why": why,
        }

    def _taken_in(self, view: Mapping[str, Any]) -> dict[str, Any]:
        self._take_decisions(view)
        self._take_gpus(view)
        queue, name = view["queue"], view["policy"]
        described = {policy["name"]: policy["parameters"] for policy in self._described}
        return {
            "policy": {
                "name": name,
                "parameters": {**described.get(name, {}), **view["parameters"]},
            },
            "policies": [self._policy(policy, view) for policy in self._described],
            "queue": {
                **queue,
                "head": [_named(row) for row in queue["head"]],
                "by_function": [_named(row) for row in queue["by_function"]],
            },
            "totals": _totals(view["totals"]),
            "owners": view.get("owners", _NO_OWNERS),
        }

    def _policy(self, described: Mapping[str, Any], view: Mapping[str, Any]) -> Json:
        in_force = view["parameters"] if described["name"] == view["policy"] else {}
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

    def _take_gpus(self, view: Mapping[str, Any]) -> None:
        gpus = {} if view["whole"] else dict(self._gpus)
        count = len(gpus)
        for gone in view["gpus_gone"]:
            gpus.pop(gone, None)
        for gpu in view["gpus"]:
            gpus[gpu["id"]] = self._gpu(gpu)
        if len(gpus) != count or view["whole"]:
            gpus = in_order(gpus)
        self._gpus = gpus

    def _gpu(self, gpu: dict[str, Any]) -> Json:
        gpu["queue"] = [_named(request) for request in gpu["queue"]]
        gpu["leases"] = [_named(lease) for lease in gpu["leases"]]
        for lease in gpu["leases"]:
            self._labels.learn(lease["models"], lease["function"])
        for resident in gpu["residents"]:
            resident["label"] = self._labels.of(resident["model"])
        return gpu

    def _take_decisions(self, view: Mapping[str, Any]) -> None:
        rows = {} if view["whole"] else dict(self._decisions)
        for row in view["decisions"]:
            namespace = row["function"].partition("/")[0]
            named = {**_named(row), "namespace": namespace}
            rows[row["request"]] = named
            self._labels.learn(row["models"], named["function"])
        newest = sorted(rows.values(), key=lambda row: -row["number"])[:_DECISIONS]
        self._decisions = {row["request"]: row for row in newest}

    def _take_figures(self, view: Mapping[str, Any]) -> None:
        """Take in what functions used and pay for."""
        if view.get("whole"):
            self._gpu_seconds.clear()
            self._billed.clear()
        for function, held_s in view.get("gpu_seconds", {}).items():
            self._gpu_seconds[full_name(function)] = held_s
        for function, (gib_seconds, cost) in view.get("billed", {}).items():
            self._billed[full_name(function)] = Billed(gib_seconds, cost)
        if len(self._gpu_seconds) > _MOST_FUNCTIONS and not view.get("whole"):
            self._mark = ""


def _named(item: Mapping[str, Any]) -> dict[str, Any]:
    function = item["function"]
    return {**item, "function": None if function is None else shown_function(function)}


def _totals(view: Mapping[str, Any]) -> Json:
    ended: Mapping[str, int] = view["ended"]
    failed = sum(count for outcome, count in ended.items() if outcome not in _NOT_FAILED)
    return {**view, "failed": failed}


_LONG_S = 30.0
_THRASHING, _ENOUGH, _ENOUGH_A_SECOND = 0.3, 100, 1.0
_MOST = 50
_MOST_OF_ONE = 10  # alerts of one namespace and code
_MOST_SKEW_S = 5.0
_LEVELS = ("critical", "warning")


def alerts(
    whole: Mapping[str, Any],
    gpus: Iterable[Json],
    functions: Iterable[Json],
    more: Iterable[Json] = (),
) -> list[Json]:
    """The most severe alerts, the worst first; features have told `more`.

    Those of functions and features come last, in turn: no namespace crowds out another one's.
    """
    one_each = [*_of_scheduler(whole["scheduler"]), *_of_queue(whole)]
    one_each += _of_jobs(whole["dead_letters"])
    owned = [*_of_functions(functions), *more]
    lines = [_Line(alert) for alert in one_each]
    lines += _in_turn(("", alert) for alert in _of_gpus(whole, list(gpus)))
    lines += _in_turn((alert["about"].partition(".")[2], alert) for alert in owned)
    lines.sort(key=lambda line: _LEVELS.index(line.alert["level"]))
    return [line.alert for line in _bounded(lines)]


class _Line(NamedTuple):
    alert: Json
    stands_for: int = 1


def _bounded(lines: list[_Line]) -> list[_Line]:
    if len(lines) <= _MOST:
        return lines
    more = sum(line.stands_for for line in lines[_MOST - 1 :])
    text = f"and {more} more of functions and workflows"
    return [*lines[: _MOST - 1], _Line(_alert("more-alerts", "alerts", text))]


def _in_turn(owned: Iterable[tuple[str, Json]]) -> list[_Line]:
    """One alert of each namespace and code, then a second one of each; each has a share."""
    groups: dict[tuple[str, str], list[Json]] = {}
    for namespace, alert in owned:
        groups.setdefault((namespace, alert["code"]), []).append(alert)
    shares = [_share(namespace, group) for (namespace, _), group in groups.items()]
    return [line for turn in zip_longest(*shares) for line in turn if line is not None]


def _share(namespace: str, group: list[Json]) -> list[_Line]:
    shown = [_Line(alert) for alert in group[:_MOST_OF_ONE]]
    more = len(group) - _MOST_OF_ONE
    if more <= 0:
        return shown
    text = f"and {more} more of {namespace or 'the GPUs'} like these: {group[0]['code']}"
    remedy = "see the lists of GPUs and functions"
    rest = {**group[0], "about": namespace or "gpus", "text": text, "what_to_do": remedy}
    return [*shown, _Line(rest, more)]


# How grave each code is, and what to do about it.
_CODES: Mapping[str, tuple[str, str]] = {
    "no-scheduler": (
        "critical",
        "start one, or look at its log: gpufaas scheduler; the state below is an old one",
    ),
    "store-lost": (
        "warning",
        "look at etcd: gpufaas doctor; no other scheduler can take over meanwhile",
    ),
    "clocks-differ": ("warning", "set both clocks (NTP): times shown here are off by as much"),
    "no-gpus": ("critical", "gpufaas gpu-manager --scheduler URL on a host with GPUs"),
    "gpu-silent": ("warning", "look at the GPU manager of {node} and at its network"),
    "gpu-taken": ("warning", "see which processes use it: nvidia-smi"),
    "load-stuck": (
        "warning",
        "see why in the GPU manager's log; it kills a worker that stands still",
    ),
    "long-wait": ("warning", "add GPUs, or see who takes them: functions by GPU seconds"),
    "thrashing": (
        "warning",
        "models take turns: add GPUs, pin the most used, or choose another policy",
    ),
    "does-not-start": ("warning", "see its log: {log}; then mend it and deploy it again"),
    "keeps-ending": ("warning", "see its log: {log}; then mend it and deploy it again"),
    "no-replica": ("warning", "see why: {log}"),
    "not-warm": ("warning", "mend its example.json, and deploy it again"),
    "jobs-away": ("warning", "see docs/async.md"),
    "dead-letters": ("warning", "see why, then replay or delete: dead letters"),
    "more-alerts": ("warning", "mend those above, or see the lists of functions and workflows"),
}


def _alert(code: str, about: str, text: str, **names: str) -> Json:
    level, what_to_do = _CODES[code]
    what = what_to_do.format(**names)
    return {"level": level, "code": code, "about": about, "text": text, "what_to_do": what}


def _of_scheduler(scheduler: Json) -> Iterator[Json]:
    if not scheduler["ok"]:
        yield _alert("no-scheduler", "scheduler", f"no scheduler answers: {scheduler['why']}")
    elif scheduler["etcd"] == "lost":
        text = "etcd is away; requests are served from memory until it is back"
        yield _alert("store-lost", "scheduler", text)
    if abs(scheduler["skew_s"]) > _MOST_SKEW_S:
        text = f"the scheduler's clock is {scheduler['skew_s']:+g} s off the gateway's"
        yield _alert("clocks-differ", "scheduler", text)


def _of_gpus(whole: Mapping[str, Any], gpus: list[Json]) -> Iterator[Json]:
    if not gpus and whole["scheduler"]["ok"]:
        text = "no GPU is attached: calls that need one are refused"
        yield _alert("no-gpus", "gpus", text)
    for gpu in gpus:
        id_ = gpu["id"]
        if gpu["state"] == "silent":
            text = f"{id_} does not report: it takes no new requests"
            yield _alert("gpu-silent", id_, text, node=gpu["node"])
        elif gpu["withheld_bytes"] > gpu["total_bytes"] // 2:
            text = f"more than half the memory of {id_} is taken by other programs"
            yield _alert("gpu-taken", id_, text)
        for load in gpu["stuck"]:
            yield _alert("load-stuck", id_, _stuck_load(gpu, load))


def _stuck_load(gpu: Json, load: Json) -> str:
    whom = ", ".join(map(shown_function, load["functions"])) or "nobody"
    what = f"the load of {short_model(load['model'])} for {whom} on {gpu['id']} of {gpu['node']}"
    at = time.strftime("%H:%M:%S", time.gmtime(load["since_s"]))
    return f"{what} has made no progress since {at} UTC"


def _of_queue(whole: Mapping[str, Any]) -> Iterator[Json]:
    head = whole["queue"]["head"]
    waited_s = max((request["waited_s"] for request in head), default=0.0)
    if waited_s > _LONG_S:
        yield _alert("long-wait", "queue", f"the first requests have waited for {waited_s:.0f} s")
    totals = whole["totals"]
    ratio, rate = totals["hit_ratio"], totals["rate"]
    enough = totals["requests"] >= _ENOUGH and rate is not None and rate > _ENOUGH_A_SECOND
    if enough and ratio is not None and ratio < _THRASHING:
        text = f"only {100 * ratio:.0f} % of requests find their model in GPU memory"
        yield _alert("thrashing", "totals", text)


def _of_functions(functions: Iterable[Json]) -> Iterator[Json]:
    for function in functions:
        id_, log = function["id"], function["log_command"]
        trouble, part_trouble = function["trouble"], function["part_trouble"]
        if trouble or part_trouble:
            what = "does not start" if trouble else "has an instance that does not start"
            text = f"{id_} {what}: {trouble or part_trouble}"
            yield _alert("does-not-start", id_, text, log=log)
        elif function["dying"]:
            text = f"instances of {id_} end again and again; the last one {function['dying']}"
            yield _alert("keeps-ending", id_, text, log=log)
        elif (
            function["wanted"]
            and not function["replicas"]
            and (function["waiting"] or function["late"])
        ):
            calls = "has calls that wait, and" if function["waiting"] else "was deployed, and"
            yield _alert("no-replica", id_, f"{id_} {calls} nothing of it runs", log=log)
        if function["template_trouble"]:
            text = f"the first calls of {id_} run on the processor: {function['template_trouble']}"
            yield _alert("not-warm", id_, text)


def _of_jobs(letters: Json) -> Iterator[Json]:
    if letters["why"]:
        text = f"async calls cannot be looked at: {letters['why']}"
        yield _alert("jobs-away", "dead_letters", text)
    if letters["count"]:
        some = (
            "one async call is" if letters["count"] == 1 else f"{letters['count']} async calls are"
        )
        yield _alert("dead-letters", "dead_letters", f"{some} not tried any more")
