"""`python -m bench.load`: calls functions at a rate, and reports latencies and failures."""

import argparse
import asyncio
import json
import math
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import uvloop

from bench.load import arrivals, result_text
from bench.load.arrivals import Arrival, Choices
from bench.load.http_callers import LoadTarget, target_at
from bench.load.load_run import LoadOutcome, TrafficPlan, run
from bench.load.statistics import CacheCounts
from common.errors import CommonError, NoResponse
from common.http.client import ClientSettings, HttpClient
from gpu_manager.errors import GpuManagerError
from gpufaas.errors import CommandError
from gpufaas.output.optional_pictures import load_pictures, make_folder
from gpufaas.remote.gateway_api import add_gateway_url_option, gateway_url
from gpufaas.remote.scheduler_api import SchedulerApi, add_scheduler_options, scheduler_api
from gpufaas.stack.examples import example_body
from scheduler.model.errors import SchedulerError
from scheduler.sim import workload
from scheduler.sim.workload import Arrivals, Pattern

_CONNECT_S = 5.0
_LOOK_S = 2.0
_EXIT_NONE_SUCCEEDED, _EXIT_BAD_USE = 1, 2
_CHART = "bench.load.latency_chart"
_JSON = "application/json"
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_FRAMING = frozenset({"content-length", "transfer-encoding", "connection", "upgrade", "expect"})


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the calls and print figures of them; 1 if no call succeeded, 2 for a bad value."""
    options = _parser().parse_args(arguments)
    options.environment = dict(os.environ)
    try:
        return _run(options)
    except (SchedulerError, GpuManagerError, CommonError, CommandError) as error:
        print(f"bench.load: {error}", file=sys.stderr)
        return _EXIT_BAD_USE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.load", description=__doc__)
    add = parser.add_argument
    most_first = "with commas or blanks, by popularity: the first one most"
    add("--functions", required=True, nargs="+", metavar="A", help=most_first)
    add("--rate", type=float, metavar="R", help="calls a second, answered or not (open loop)")
    add(
        "--clients",
        type=int,
        metavar="N",
        help="clients that call again once answered (closed loop)",
    )
    add("--seconds", type=float, default=10.0, metavar="S", help="how long (10)")
    add("--popularity", default="uniform", metavar="P", help="uniform, thesis or zipf:EXPONENT")
    kinds = [kind.value for kind in Arrivals]
    add("--arrivals", choices=kinds, default=Arrivals.POISSON.value, help="at a rate (poisson)")
    add("--bunch-s", type=float, default=0.0, help="bunched: all in a minute's first S seconds")
    add("--trace", metavar="FILE", help="calls as in an Azure trace; `azure`: the carried one")
    add("--trace-start", type=int, default=0, metavar="MINUTE", help="first minute of it (0)")
    add("--speed", type=float, default=1.0, metavar="X", help="times as fast as the trace (1)")
    add("--body", metavar="@FILE|JSON", help="what to send (functions/NAME/example.json)")
    add("--header", "-H", action="append", default=[], metavar="NAME: VALUE", help="of each call")
    add("--timeout", type=float, default=60.0, metavar="S", help="of a call (60)")
    add("--seed", type=int, default=1, metavar="N", help="of arrivals and choices (1)")
    add_gateway_url_option(parser)
    add("--out", metavar="DIR", help="draw latencies there, in load.png (no picture)")
    add_scheduler_options(parser)
    return parser


def _run(options: argparse.Namespace) -> int:
    plan = _plan(options)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        outcome, cache = runner.run(_load(plan, options))
    picture = _draw(outcome, options.out) if options.out else None
    if options.json:
        print(json.dumps(result_text.as_json(outcome, cache, picture), indent=1))
    else:
        print(result_text.result_text(outcome, cache))
        if picture is not None:
            print(f"\npicture: {picture}")
    return 0 if outcome.tally.figures().succeeded else _EXIT_NONE_SUCCEEDED


# -- the plan -------------------------------------------------------------------------------------


def _plan(options: argparse.Namespace) -> TrafficPlan:
    given = (name.strip() for text in options.functions for name in text.split(","))
    names = tuple(name for name in given if name)
    _check(options, names)
    closed = options.clients is not None
    popularity = arrivals.shares(options.popularity, len(names))
    due = [] if closed else _arrivals(options, popularity)
    bodies = [_body(name, options.body) for name in names]
    headers = dict(map(_header, options.header))
    target = target_at(gateway_url(options.gateway, options.environment))
    return TrafficPlan(
        target=target,
        functions=names,
        requests=[
            target.request(name, body, _kind(body), headers)
            for name, body in zip(names, bodies, strict=True)
        ],
        seconds=options.seconds,
        timeout_s=options.timeout,
        arrivals=due,
        clients=options.clients or 0,
        choices=Choices(popularity, options.seed),
    )


def _check(options: argparse.Namespace, names: tuple[str, ...]) -> None:
    if not names:
        raise CommandError("--functions names no function")
    if options.clients is not None and (options.trace or options.rate is not None):
        raise CommandError("--clients is a load of its own: without --rate and --trace")
    if options.clients is None and options.rate is None and not options.trace:
        raise CommandError("how much load? use --rate R, --clients N or --trace FILE")
    if options.trace and options.popularity != "uniform":
        raise CommandError("a trace has its own popularity: without --popularity")
    for name in ("rate", "clients", "seconds", "speed", "timeout"):
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            raise CommandError(f"--{name} must be more than 0, not {value:g}")


def _arrivals(options: argparse.Namespace, popularity: list[float]) -> list[Arrival]:
    pattern = Pattern(Arrivals(options.arrivals), options.bunch_s)
    if not options.trace:
        return arrivals.at_rate(popularity, options.rate, options.seconds, pattern, options.seed)
    workload.read(options.trace)  # an invalid file is reported before other errors
    found = arrivals.traced(
        options.trace, len(popularity), options.trace_start, options.seconds, options.speed
    )
    return found.arrivals(options.rate, pattern, options.seed)


def _body(function: str, option: str | None) -> bytes:
    """The option's file or JSON; else that of the function's first example call, or nothing."""
    if option is None:
        return example_body(Path("functions", function.partition(".")[0]))
    if _kind(option.encode()) == _JSON:
        return option.encode()
    try:
        return Path(option.removeprefix("@")).read_bytes()
    except OSError as error:
        raise CommandError(f"--body {option}: {error.strerror}, nor is it JSON") from error


def _kind(body: bytes) -> str:
    try:
        json.loads(body)
    except ValueError:
        return "application/octet-stream"
    return _JSON


def _header(text: str) -> tuple[str, str]:
    """A header of every call; the names of ours are in small letters."""
    name, colon, value = text.partition(":")
    is_plain = colon and _TOKEN.fullmatch(name) and value.isascii() and value.isprintable()
    if not is_plain or name.lower() in _FRAMING:
        raise CommandError(
            f"--header {text!r}: NAME: VALUE is expected, not one that frames a body"
        )
    return name.lower(), value.strip()


# -- the run --------------------------------------------------------------------------------------


async def _load(
    plan: TrafficPlan, options: argparse.Namespace
) -> tuple[LoadOutcome, CacheCounts | None]:
    await _check_gateway(plan.target)
    scheduler = _scheduler(options)
    before = await _cache_counts(scheduler)
    if before is None:
        print("no hit ratio: no scheduler answers (--scheduler URL)", file=sys.stderr)
    line = result_text.ProgressLine(wanted=not options.json)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    watching = loop.create_task(_watch_cache(scheduler, before, line))
    try:
        outcome = await run(
            plan, stop, lambda now, in_flight: line.update(now, in_flight, time.monotonic())
        )
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        line.close()
    after = None if before is None else await _cache_counts(scheduler)
    return outcome, None if before is None or after is None else after.since(before)


async def _check_gateway(target: LoadTarget) -> None:
    """CommandError if no server accepts a connection."""
    client = HttpClient(ClientSettings(connect_s=_CONNECT_S, tls=target.tls))
    try:
        connection = await client.connect(target.address)
    except NoResponse as error:
        raise CommandError(
            f"no gateway answers at {target.url}: {error}; `gpufaas up` starts one, "
            "--gateway URL names another"
        ) from error
    connection.fail("nothing is asked")


def _scheduler(options: argparse.Namespace) -> SchedulerApi | None:
    try:
        return scheduler_api(options)
    except (CommandError, GpuManagerError) as error:
        if options.scheduler:
            raise
        print(f"no hit ratio: {error}", file=sys.stderr)
        return None


async def _cache_counts(scheduler: SchedulerApi | None) -> CacheCounts | None:
    if scheduler is None:
        return None
    try:
        cluster = await asyncio.to_thread(scheduler.get, "/cluster")
    except CommandError:
        return None
    return CacheCounts(cluster["hits"], cluster["misses"], cluster["evictions"])


async def _watch_cache(
    scheduler: SchedulerApi | None, before: CacheCounts | None, line: result_text.ProgressLine
) -> None:
    while line.shown and before is not None:
        await asyncio.sleep(_LOOK_S)
        now = await _cache_counts(scheduler)
        line.cache = line.cache if now is None else now.since(before)


# -- the picture ----------------------------------------------------------------------------------


def _draw(outcome: LoadOutcome, out: str) -> str | None:
    """Draw the picture; None, with a message, if that fails: the figures are still printed."""
    if not len(outcome.tally):
        return None
    try:
        path = make_folder(out) / "load.png"
        load_pictures(_CHART).draw(outcome, path)
    except (CommandError, OSError) as error:
        print(f"no picture: {error}", file=sys.stderr)
        return None
    return str(path)


if __name__ == "__main__":
    sys.exit(main())
