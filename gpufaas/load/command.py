"""`gpufaas load`: reads the options, has the load run, and shows what came of it."""

import argparse
import asyncio
import contextlib
import json
import math
import signal
import sys
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

import uvloop

from gpu_manager.errors import GpuManagerError
from gpufaas import drawing
from gpufaas.arguments import Commands
from gpufaas.errors import CommandError
from gpufaas.load import arrivals, shown
from gpufaas.load.arrivals import Arrival, Choices
from gpufaas.load.calling import Address, address_of
from gpufaas.load.running import Outcome, Plan, run
from gpufaas.load.tally import Cache
from gpufaas.remote import Remote, add_scheduler_options, remote
from gpufaas.stack.folder import stack_folder
from scheduler.sim import trace
from scheduler.sim.workload import Arrivals, Pattern

_DEFAULT_URL = "http://127.0.0.1:8080"
_AWAY_S = 5.0
_LOOK_S = 2.0
_EXIT_NOTHING_WENT_WELL = 1


def add_parser(commands: Commands) -> None:
    """Describe the command's options."""
    parser = commands.add_parser("load", help="call functions at a rate, and measure")
    add = parser.add_argument
    add("--functions", required=True, metavar="A,B,C", help="by popularity, the first one most")
    add("--rate", type=float, metavar="R", help="calls a second, answered or not (open loop)")
    add("--clients", type=int, metavar="N", help="who call again once answered (closed loop)")
    add("--seconds", type=float, default=10.0, metavar="S", help="for so long (10)")
    add("--popularity", default="uniform", metavar="P", help="uniform, thesis or zipf:EXPONENT")
    kinds = [kind.value for kind in Arrivals]
    add("--arrivals", choices=kinds, default=Arrivals.POISSON.value, help="at a rate (poisson)")
    add("--bunch-s", type=float, default=0.0, help="bunched: all in a minute's first S seconds")
    add("--trace", metavar="FILE", help="calls as in an Azure trace; `azure`: the carried one")
    add("--trace-start", type=int, default=0, metavar="MINUTE", help="first minute of it (0)")
    add("--speed", type=float, default=1.0, metavar="X", help="times as fast as the trace (1)")
    add("--body", metavar="FILE|JSON", help="what to send (functions/NAME/example.json)")
    add("--timeout", type=float, default=60.0, metavar="S", help="of a call (60)")
    add("--seed", type=int, default=1, metavar="N", help="of arrivals and choices (1)")
    add("--gateway", metavar="URL", help=f"(OPENFAAS_URL, or the stack's, or {_DEFAULT_URL})")
    add("--out", default="out", metavar="DIR", help="where load.png goes (out)")
    add_scheduler_options(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    plan = _plan(options)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        outcome, cache = runner.run(_load(plan, options))
    picture = _draw(outcome, options.out)
    if options.json:
        print(json.dumps(shown.as_json(outcome, cache, picture), indent=1))
    else:
        print(shown.in_words(outcome, cache))
        if picture is not None:
            print(f"\npicture: {picture}")
    return 0 if outcome.tally.figures().succeeded else _EXIT_NOTHING_WENT_WELL


# -- the plan -------------------------------------------------------------------------------------


def _plan(options: argparse.Namespace) -> Plan:
    names = tuple(name.strip() for name in options.functions.split(",") if name.strip())
    _check(options, names)
    address = address_of(_gateway(options))
    closed = options.clients is not None
    popularity = arrivals.shares(options.popularity, len(names))
    return Plan(
        address=address,
        functions=names,
        requests=[_request(address, name, options.body) for name in names],
        seconds=options.seconds,
        timeout_s=options.timeout,
        arrivals=[] if closed else _arrivals(options, popularity),
        clients=options.clients or 0,
        choices=Choices(popularity, options.seed),
    )


def _check(options: argparse.Namespace, names: tuple[str, ...]) -> None:
    if not names:
        raise CommandError("--functions names no function")
    if options.clients is not None and (options.trace or options.rate is not None):
        raise CommandError("--clients is a load of its own: without --rate and --trace")
    if options.clients is None and options.rate is None and not options.trace:
        raise CommandError("say how much: --rate R, --clients N or --trace FILE")
    if options.trace and options.popularity != "uniform":
        raise CommandError("a trace has its own popularity: without --popularity")
    for name in ("rate", "clients", "seconds", "speed", "timeout"):
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            raise CommandError(f"--{name} must be more than 0, not {value:g}")


def _gateway(options: argparse.Namespace) -> str:
    environment: Mapping[str, str] = options.environment
    named: str | None = options.gateway or environment.get("OPENFAAS_URL")
    if named:
        return named
    running = stack_folder(None, environment).running()
    return _DEFAULT_URL if running is None else running.gateway


def _arrivals(options: argparse.Namespace, popularity: list[float]) -> list[Arrival]:
    pattern = Pattern(Arrivals(options.arrivals), options.bunch_s)
    if not options.trace:
        return arrivals.at_rate(popularity, options.rate, options.seconds, pattern, options.seed)
    trace.read(options.trace)  # one that is none is told before anything else
    found = arrivals.traced(
        options.trace, len(popularity), options.trace_start, options.seconds, options.speed
    )
    return found.arrivals(options.rate, pattern, options.seed)


def _request(address: Address, function: str, said: str | None) -> bytes:
    body = _body(function, said)
    try:
        json.loads(body)
    except ValueError:
        return address.request(function, body, "application/octet-stream")
    return address.request(function, body, "application/json")


def _body(function: str, said: str | None) -> bytes:
    """What was said, as a file or itself; else what the function's folder proposes, or nothing."""
    path = Path("functions", function.partition(".")[0], "example.json")
    if said is None and not path.is_file():
        return b""
    try:
        if said is None:
            return path.read_bytes()
        if _is_json(said):
            return said.encode()
        return Path(said).read_bytes()
    except OSError as error:
        raise CommandError(f"--body {said or path}: {error.strerror}, nor is it JSON") from error


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


# -- the run --------------------------------------------------------------------------------------


async def _load(plan: Plan, options: argparse.Namespace) -> tuple[Outcome, Cache | None]:
    await _there(plan.address)
    asked = _scheduler(options)
    before = await _counted(asked)
    if before is None:
        print("no hit ratio: no scheduler answers (--scheduler URL)", file=sys.stderr)
    line = shown.Line(wanted=not options.json)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    watching = loop.create_task(_watch_cache(asked, before, line))
    try:
        outcome = await run(
            plan, stop, lambda now, in_flight: line.update(now, in_flight, time.monotonic())
        )
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        line.close()
    after = None if before is None else await _counted(asked)
    return outcome, None if before is None or after is None else after.since(before)


async def _there(address: Address) -> None:
    """CommandError where nobody answers at all."""
    try:
        async with asyncio.timeout(_AWAY_S):
            _, writer = await asyncio.open_connection(address.host, address.port, ssl=address.tls)
    except TimeoutError as error:
        raise CommandError(f"no gateway answers at {address.url} within {_AWAY_S:g} s") from error
    except OSError as error:
        why = error.strerror or error
        raise CommandError(
            f"no gateway answers at {address.url}: {why}; `gpufaas up` starts one, "
            "--gateway URL names another"
        ) from error
    writer.close()
    with contextlib.suppress(OSError):  # it was there, and that is all that is asked
        await writer.wait_closed()


def _scheduler(options: argparse.Namespace) -> Remote | None:
    try:
        return remote(options)
    except (CommandError, GpuManagerError) as error:
        if options.scheduler:
            raise
        print(f"no scheduler is asked: {error}", file=sys.stderr)
        return None


async def _counted(asked: Remote | None) -> Cache | None:
    if asked is None:
        return None
    try:
        cluster = await asyncio.to_thread(asked.get, "/cluster")
    except CommandError:
        return None
    return Cache(cluster["hits"], cluster["misses"], cluster["evictions"])


async def _watch_cache(asked: Remote | None, before: Cache | None, line: shown.Line) -> None:
    while line.shown and before is not None:
        await asyncio.sleep(_LOOK_S)
        now = await _counted(asked)
        line.cache = line.cache if now is None else now.since(before)


# -- the picture ----------------------------------------------------------------------------------


def _draw(outcome: Outcome, out: str) -> str | None:
    """Where it is; None, with a word, where none can be drawn: the figures are worth more."""
    if not len(outcome.tally):
        return None
    try:
        drawing.pictures()
        path = drawing.folder(out) / "load.png"
        import_module("gpufaas.load.picture").draw(outcome, path)
    except (CommandError, OSError) as error:
        print(f"no picture: {error}", file=sys.stderr)
        return None
    return str(path)
