"""`gpufaas explain`: why a call or a request was placed where it was, and its outcome."""

import argparse
import http.client
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from common.foreign_text import plain, printable
from gpufaas.commands.trace import call_spans, named_call
from gpufaas.errors import CommandError
from gpufaas.options.shared import Commands, print_answer
from gpufaas.output.request_text import request_text
from gpufaas.remote.gateway_api import GatewayApi, add_gateway_options, gateway_api
from gpufaas.remote.scheduler_api import (
    SchedulerApi,
    add_scheduler_options,
    request_story,
    scheduler_api,
)

_STATUS = "http.response.status_code"
_LOCAL, _REQUEST, _LEASE, _GPU = "gpufaas.local", "gpufaas.request", "gpufaas.lease", "gpufaas.gpu"


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("explain", help="why a call was placed where it was")
    which = "an X-Call-Id, or how that begins, or a request's id; without one, the latest requests"
    parser.add_argument("request", nargs="?", metavar="CALL", type=named_call, help=which)
    add_gateway_options(parser)
    add_scheduler_options(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    scheduler = scheduler_api(options)
    if options.request is None:
        return print_answer(scheduler.get("/explain?named=true"), options, latest_text, indent=None)
    told = explanation(scheduler, lambda: gateway_api(options), options.request)
    story = told["requests"][0] if len(told.get("requests", ())) == 1 else told
    return print_answer(story, options, lambda _: call_text(told))


def explanation(
    scheduler: SchedulerApi, gateway: Callable[[], GatewayApi], call: str
) -> dict[str, Any]:
    """What is known of a call or a request: its `requests`, else the `spans` of its trace.

    The gateway is looked for only if the scheduler knows no request of this id.
    """
    try:
        return {"requests": [request_story(scheduler, call)]}
    except CommandError as unknown:
        try:
            spans = call_spans(gateway(), call)
        except CommandError as error:
            raise CommandError(f"{unknown}; and the gateway: {error}") from error
    requests = dict.fromkeys(span["attributes"].get(_REQUEST) for span in spans)
    stories = [_remembered(scheduler, request) for request in requests if request]
    remembered = [story for story in stories if story is not None]
    return {"requests": remembered} if remembered else {"spans": spans}


def call_text(told: dict[str, Any]) -> str:
    if "requests" in told:
        return "\n".join(map(request_text, told["requests"]))
    return "\n".join(_without_request(printable(told["spans"])))


def latest_text(requests: list[dict[str, Any]]) -> str:
    none = "no request yet: call a function that uses a GPU"
    return "\n".join(map(_latest, requests)) or none


def _latest(request: dict[str, Any]) -> str:
    function, name = plain(request["function"]), plain(request["request"])
    return f"{request['arrived_ago_s']:9.1f} s ago  {function}  {name}"


def _remembered(scheduler: SchedulerApi, request: str) -> dict[str, Any] | None:
    """A request that the call's function made, unless the scheduler has forgotten it."""
    with suppress(CommandError):
        return request_story(scheduler, request)
    return None


def _without_request(spans: list[dict[str, Any]]) -> Iterator[str]:
    """Where a call ran that no request is known of."""
    yield spans[0]["name"]
    attributes = [span["attributes"] for span in spans]
    for reason in dict.fromkeys(filter(None, (facts.get(_LOCAL) for facts in attributes))):
        yield f"  by the function's own processor: {reason}; no GPU was asked for"
    leases = [facts for facts in attributes if facts.get(_LEASE)]
    for lease in dict.fromkeys(facts[_LEASE] for facts in leases):
        gpu = next(
            (facts[_GPU] for facts in leases if facts[_LEASE] == lease and _GPU in facts), "its GPU"
        )
        yield f"  on {gpu} under lease {lease}, which stood from an earlier call"
    if not leases and not any(facts.get(_LOCAL) for facts in attributes):
        yield "  it used no GPU"
    yield from _failure(spans[0])


def _failure(call: dict[str, Any]) -> Iterator[str]:
    """How a call failed: also one that broke off when its status had been sent, or was refused."""
    status, error = call["attributes"].get(_STATUS, 0), call.get("error", "")
    if error not in {"", f"status {status}"}:
        yield f"  it failed, status {status}: {error}"
    elif status >= http.client.INTERNAL_SERVER_ERROR:
        yield f"  it was answered {status}"
