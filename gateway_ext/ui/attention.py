"""Alerts for the operator, derived from the page's state; pure."""

import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest
from typing import Any, NamedTuple

from gateway_ext.ui.shown_names import short_model, shown_function
from gateway_ext.ui.state import Json

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
    "more-alerts": (
        "warning",
        "mend those above, or see the lists of functions and workflows",
    ),
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
