"""`gpufaas trace`: the spans of one call, from the gateway to the GPU and back."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

from common.foreign_text import printable
from gpu_manager.errors import GpuManagerError
from gpufaas.errors import CommandError
from gpufaas.options.shared import Commands, print_answer
from gpufaas.remote.gateway_api import GatewayApi, add_gateway_options, gateway_api
from gpufaas.remote.scheduler_api import SchedulerApi, add_scheduler_options, in_path, scheduler_api

Shown = Mapping[str, Any]

_TIME = "{:ms}"  # seconds that are shown as milliseconds
_MS = 1e6  # nanoseconds
_PATH = "/system/traces"
_SHORTEST = 8  # beginning of an id
_REQUEST = "gpufaas.request"
# The attributes of a span that are shown, and their texts.
_WORDS: Sequence[tuple[str, str]] = (
    ("gpufaas.stage", "stage {}"),
    ("gpufaas.skipped", "skipped: {}"),
    ("http.response.status_code", "status {}"),
    ("gpufaas.running", "still running"),
    ("gpufaas.first_byte_s", "first byte after {:ms}"),
    ("gpufaas.outcome", "{}"),
    ("gpufaas.rule", "{}"),
    ("gpufaas.request", "request {}"),
    ("gpufaas.lease", "lease {}"),
    ("gpufaas.gpu", "{}"),
    ("gpufaas.node", "on {}"),
    ("gpufaas.hit", "hit: {}"),
    ("gpufaas.model", "model {}"),
    ("gpufaas.batch", "batch {}"),
    ("gpufaas.local", "by the function's own processor: {}"),
    ("gpufaas.from", "from {}"),
    ("gpufaas.ahead", "{} ahead"),
    ("gpufaas.runs", "{} runs"),
    ("gpufaas.run_s", "run {:ms}"),
    ("gpufaas.queue_s", "queue {:ms}"),
    ("gpufaas.load_s", "load {:ms}"),
    ("gpufaas.expected_load_s", "expected load {:ms}"),
    ("gpufaas.expected_run_s", "expected run {:ms}"),
    ("gpufaas.queued_s", "waited {:ms} for a thread"),
    ("gpufaas.calls_left_out", "{} graph calls are not listed"),
    ("gpufaas.calls_left_out_s", "which took {:ms}"),
)


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("trace", help="where a call went, and what took how long")
    which = "its X-Call-Id, or how that begins, or a request's id; without one, the latest calls"
    parser.add_argument("call", nargs="?", type=named_call, help=which)
    add_gateway_options(parser)
    add_scheduler_options(parser)
    parser.set_defaults(run=_run)


def named_call(text: str) -> str:
    """The argument that names a call: an empty one, as of an unset variable, names none."""
    if not text:
        raise argparse.ArgumentTypeError("an X-Call-Id, or how that begins, is expected")
    return text


def _run(options: argparse.Namespace) -> int:
    gateway = gateway_api(options)
    if options.call is None:
        return print_answer(gateway.get(_PATH), options, latest_text, indent=None)
    story = request_trace(gateway, _scheduler(options), options.call)
    return print_answer(story, options, lambda _: "\n".join(trace_text(story)))


def _scheduler(options: argparse.Namespace) -> SchedulerApi:
    """The scheduler; without one its spans alone are missing."""
    try:
        return scheduler_api(options)
    except (CommandError, GpuManagerError):
        if options.scheduler:
            raise
        return SchedulerApi((), "")


def request_trace(gateway: GatewayApi, scheduler: SchedulerApi, call_id: str) -> dict[str, Any]:
    """A call's spans, or a request's; `missing` lists a call's requests whose spans are unknown."""
    missing: list[str] = []
    try:
        spans = call_spans(gateway, call_id)
    except CommandError:
        with suppress(CommandError):
            spans = scheduler.get(f"/traces/{in_path(call_id)}")["spans"]
            return {"call_id": call_id, "spans": spans, "missing": missing}
        raise
    for span in list(spans):
        request = span["attributes"].get(_REQUEST)
        if request is None:
            continue
        try:
            request_spans = scheduler.get(f"/traces/{in_path(request)}")["spans"]
        except CommandError as error:
            missing.append(f"request {request}: {error}")
        else:
            spans += _attached_below(span, request_spans)
    return {"call_id": call_id, "spans": spans, "missing": missing}


def call_spans(gateway: GatewayApi, call_id: str) -> list[dict[str, Any]]:
    """The spans of a call, by its id or by the beginning of that alone."""
    try:
        spans: list[dict[str, Any]] = gateway.get(f"{_PATH}/{quote(call_id, safe='')}")["spans"]
    except CommandError as unknown:
        latest = (call["call_id"] for call in gateway.get(_PATH)["calls"])
        ids = {each for each in latest if each.startswith(call_id)} - {call_id}
        if len(call_id) >= _SHORTEST and len(ids) == 1:
            return call_spans(gateway, ids.pop())
        many = f"{len(ids)} of the latest calls begin so, " if ids else ""
        expected = f"{many}an X-Call-Id or at least its first {_SHORTEST} characters are expected"
        raise CommandError(f"{unknown}; {expected}") from unknown
    return spans


def trace_text(story: Shown) -> Iterator[str]:
    """The spans as a tree, one line each: begin, duration, name and attributes."""
    story = printable(story)
    spans: Sequence[Shown] = sorted(story["spans"], key=lambda span: span["begin_ns"])
    ids = {span["span_id"] for span in spans}
    roots = [span for span in spans if span["parent_id"] not in ids]
    begun_ns = spans[0]["begin_ns"]
    traces = ", ".join(dict.fromkeys(span["trace_id"] for span in spans))
    yield f"call {story['call_id']}, trace {traces}"
    yield f"{'began':>12} {'took':>12}"
    shown: set[int] = set()
    # Spans that form a circle are below no root; they follow the tree.
    for root in [*roots, *spans]:
        for depth, span in _tree(root, spans, 0, shown):
            yield _line(span, depth, begun_ns)
    for missing in story["missing"]:
        yield f"(missing: {missing})"


def latest_text(answer: Shown) -> str:
    return "\n".join(map(_latest, printable(answer)["calls"])) or "no call yet: call a function"


def _attached_below(span: Shown, spans: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The request's spans, attached below the gateway's span even if they have another trace."""
    ids = {child["span_id"] for child in spans}
    for child in spans:
        child["trace_id"] = span["trace_id"]
        if child["parent_id"] not in ids:
            child["parent_id"] = span["span_id"]
    return spans


def _tree(
    span: Shown, spans: Sequence[Shown], depth: int, shown: set[int]
) -> Iterator[tuple[int, Shown]]:
    """A span and its descendants, each once: spans from functions may form a circle."""
    if id(span) in shown:
        return
    shown.add(id(span))
    yield depth, span
    for child in spans:
        if child["parent_id"] == span["span_id"]:
            yield from _tree(child, spans, depth + 1, shown)


def _line(span: Shown, depth: int, begun_ns: int) -> str:
    began = _ms((span["begin_ns"] - begun_ns) / _MS)
    took = _ms((span["end_ns"] - span["begin_ns"]) / _MS)
    service = span["service"].removeprefix("gpufaas-")
    details = ", ".join(_facts(span))
    return f"{began:>12} {took:>12}  {'  ' * depth}{span['name']} [{service}] {details}".rstrip()


def _facts(span: Shown) -> Iterator[str]:
    for name, words in _WORDS:
        value = span["attributes"].get(name)
        if isinstance(value, bool):
            value = "yes" if value else "no"
        if value is None or value == "":
            continue
        if _TIME in words:
            yield words.replace(_TIME, _ms(float(value) * 1e3))
        else:
            yield words.format(value)
    if span.get("error"):
        yield f"FAILED: {span['error']}"


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.3f} ms"


def _latest(call: Shown) -> str:
    status = "running" if call["running"] else call["status"]
    if call.get("failed") and call["status"] < HTTPStatus.BAD_REQUEST:
        status = f"{status}, broke off"
    return f"{call['call_id']}  {call['function']}  {status}  {_ms(call['took_s'] * 1e3)}"
