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
    refused_workflows: Iterable[tuple[str, str]] = (),
) -> list[Json]:
    """The most severe alerts, the worst first; a refused workflow comes with the reason.

    Those of functions and workflows come last, in turn: no namespace crowds out another one's.
    """
    one_each = [*_of_scheduler(whole["scheduler"]), *_of_queue(whole)]
    one_each += _of_jobs(whole["dead_letters"])
    owned = [*_of_functions(functions)]
    owned += [_refused_workflow(name, why) for name, why in refused_workflows]
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
    remedy = "mend those above, or see the lists of functions and workflows"
    return [*lines[: _MOST - 1], _Line(_alert("warning", "more-alerts", "alerts", text, remedy))]


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
    level, code = group[0]["level"], group[0]["code"]
    text = f"and {more} more of {namespace or 'the GPUs'} like these: {code}"
    remedy = "see the lists of GPUs and functions"
    return [*shown, _Line(_alert(level, code, namespace or "gpus", text, remedy), more)]


def _alert(level: str, code: str, about: str, text: str, what_to_do: str) -> Json:
    return {"level": level, "code": code, "about": about, "text": text, "what_to_do": what_to_do}


def _of_scheduler(scheduler: Json) -> Iterator[Json]:
    if not scheduler["ok"]:
        yield _alert(
            "critical",
            "no-scheduler",
            "scheduler",
            f"no scheduler answers: {scheduler['why']}",
            "start one, or look at its log: gpufaas scheduler; the state below is an old one",
        )
    elif scheduler["etcd"] == "lost":
        yield _alert(
            "warning",
            "store-lost",
            "scheduler",
            "etcd is away; requests are served from memory until it is back",
            "look at etcd: gpufaas doctor; no other scheduler can take over meanwhile",
        )
    if abs(scheduler["skew_s"]) > _MOST_SKEW_S:
        yield _alert(
            "warning",
            "clocks-differ",
            "scheduler",
            f"the scheduler's clock is {scheduler['skew_s']:+g} s off the gateway's",
            "set both clocks (NTP): times shown here are off by as much",
        )


def _of_gpus(whole: Mapping[str, Any], gpus: list[Json]) -> Iterator[Json]:
    if not gpus and whole["scheduler"]["ok"]:
        yield _alert(
            "critical",
            "no-gpus",
            "gpus",
            "no GPU is attached: calls that need one are refused",
            "gpufaas gpu-manager --scheduler URL on a host with GPUs",
        )
    for gpu in gpus:
        if gpu["state"] == "silent":
            yield _alert(
                "warning",
                "gpu-silent",
                gpu["id"],
                f"{gpu['id']} does not report: it takes no new requests",
                f"look at the GPU manager of {gpu['node']} and at its network",
            )
        elif gpu["withheld_bytes"] > gpu["total_bytes"] // 2:
            yield _alert(
                "warning",
                "gpu-taken",
                gpu["id"],
                f"more than half the memory of {gpu['id']} is taken by other programs",
                "see which processes use it: nvidia-smi",
            )
        for load in gpu["stuck"]:
            yield _stuck_load(gpu, load)


def _stuck_load(gpu: Json, load: Json) -> Json:
    whom = ", ".join(map(shown_function, load["functions"])) or "nobody"
    what = f"the load of {short_model(load['model'])} for {whom} on {gpu['id']} of {gpu['node']}"
    at = time.strftime("%H:%M:%S", time.gmtime(load["since_s"]))
    return _alert(
        "warning",
        "load-stuck",
        gpu["id"],
        f"{what} has made no progress since {at} UTC",
        "see why in the GPU manager's log; it kills a worker that stands still",
    )


def _of_queue(whole: Mapping[str, Any]) -> Iterator[Json]:
    head = whole["queue"]["head"]
    waited_s = max((request["waited_s"] for request in head), default=0.0)
    if waited_s > _LONG_S:
        yield _alert(
            "warning",
            "long-wait",
            "queue",
            f"the first requests have waited for {waited_s:.0f} s",
            "add GPUs, or see who takes them: functions by GPU seconds",
        )
    totals = whole["totals"]
    ratio, rate = totals["hit_ratio"], totals["rate"]
    enough = totals["requests"] >= _ENOUGH and rate is not None and rate > _ENOUGH_A_SECOND
    if enough and ratio is not None and ratio < _THRASHING:
        yield _alert(
            "warning",
            "thrashing",
            "totals",
            f"only {100 * ratio:.0f} % of requests find their model in GPU memory",
            "models take turns: add GPUs, pin the most used, or choose another policy",
        )


def _of_functions(functions: Iterable[Json]) -> Iterator[Json]:
    for function in functions:
        id_, log = function["id"], function["log_command"]
        trouble, part_trouble = function["trouble"], function["part_trouble"]
        if trouble or part_trouble:
            what = "does not start" if trouble else "has an instance that does not start"
            yield _alert(
                "warning",
                "does-not-start",
                id_,
                f"{id_} {what}: {trouble or part_trouble}",
                f"see its log: {log}; then mend it and deploy it again",
            )
        elif function["dying"]:
            yield _alert(
                "warning",
                "keeps-ending",
                id_,
                f"instances of {id_} end again and again; the last one {function['dying']}",
                f"see its log: {log}; then mend it and deploy it again",
            )
        elif (
            function["wanted"]
            and not function["replicas"]
            and (function["waiting"] or function["late"])
        ):
            calls = "has calls that wait, and" if function["waiting"] else "was deployed, and"
            yield _alert(
                "warning",
                "no-replica",
                id_,
                f"{id_} {calls} nothing of it runs",
                f"see why: {log}",
            )
        if function["template_trouble"]:
            yield _alert(
                "warning",
                "not-warm",
                id_,
                f"the first calls of {id_} run on the processor: {function['template_trouble']}",
                "mend its example.json, and deploy it again",
            )


def _refused_workflow(name: str, why: str) -> Json:
    return _alert(
        "warning",
        "workflow-left-out",
        name,
        f"the stored workflow {name} is left out: {why}",
        "mend its file and deploy it again, or remove it: gpufaas workflow",
    )


def _of_jobs(letters: Json) -> Iterator[Json]:
    if letters["why"]:
        yield _alert(
            "warning",
            "jobs-away",
            "dead_letters",
            f"async calls cannot be looked at: {letters['why']}",
            "see docs/async.md",
        )
    if letters["count"]:
        some = (
            "one async call is" if letters["count"] == 1 else f"{letters['count']} async calls are"
        )
        yield _alert(
            "warning",
            "dead-letters",
            "dead_letters",
            f"{some} not tried any more",
            "see why, then replay or delete: dead letters",
        )
