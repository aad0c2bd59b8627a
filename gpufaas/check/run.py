"""Runs a program as `gpufaas exec` does, and reads what the shim and our probe noted of it."""

import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gpufaas.errors import CommandError
from gpufaas.signals import Signals
from gpufaas.tally import Tally

_PROBE = Path(__file__).parent / "probe"
_OURS = b"gpufaas exec: "
_EXIT_SIGNAL = 128


class Break(NamedTuple):
    """Where a graph ended, and why."""

    file: str
    line: int
    reason: str


class LocalGraph(NamedTuple):
    """A captured graph that ran in the function."""

    file: str
    line: int
    reason: str
    calls: int
    operators: int


class Operator(NamedTuple):
    """An operator that ran outside of any graph, at one line."""

    file: str
    line: int
    name: str
    calls: int
    seconds: float
    fastest_s: float


class Refused(NamedTuple):
    """A call that the shim cannot redirect."""

    file: str
    line: int
    call: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Ran:
    """What a run of the program showed."""

    code: int
    took_s: float
    graph_calls: int
    graph_operators: int
    local_operators: int
    breaks: Sequence[Break] = ()
    local: Sequence[LocalGraph] = ()
    operators: Sequence[Operator] = ()
    refused: Sequence[Refused] = ()


def run(
    program: Sequence[str], options: Sequence[str], environment: Mapping[str, str], *, quiet: bool
) -> Ran:
    """Run it to its end; `quiet` sends what it prints to our standard error."""
    return asyncio.run(_run(program, options, environment, quiet=quiet))


async def _run(
    program: Sequence[str], options: Sequence[str], environment: Mapping[str, str], *, quiet: bool
) -> Ran:
    command = [sys.executable, "-m", "gpufaas.cli", "exec", *options, "--", *program]
    with Signals() as signals, Tally() as stats, Tally() as notes:
        if signals.pending is not None:
            raise CommandError(f"ended by signal {signals.pending}")
        start_s = asyncio.get_running_loop().time()
        child = await asyncio.create_subprocess_exec(
            *command,
            env=_environment(environment, stats, notes),
            stdout=sys.stderr.fileno() if quiet else None,
            stderr=asyncio.subprocess.PIPE,
        )
        signals.program(child)
        never_ran = await _pass_on(child.stderr)
        code = await child.wait()
        took_s = asyncio.get_running_loop().time() - start_s
        if code and never_ran:
            raise CommandError("the program did not run")
        return _read(
            code if code >= 0 else _EXIT_SIGNAL - code, took_s, _lines(stats), _lines(notes)
        )


def _environment(environment: Mapping[str, str], stats: Tally, notes: Tally) -> dict[str, str]:
    """Ours, with places for the shim's stats and for the probe's notes."""
    path = environment.get("PYTHONPATH")
    return {
        **environment,
        "PYTHONPATH": f"{_PROBE}{os.pathsep}{path}" if path else str(_PROBE),
        "GPUFAAS_STATS": stats.path,
        "GPUFAAS_CHECK": notes.path,
    }


async def _pass_on(errors: asyncio.StreamReader | None) -> bool:
    """Show what the program says; whether it was `exec` that spoke first, and so alone."""
    assert errors is not None
    beginning = b""
    while data := await errors.read(1 << 16):
        beginning = (beginning + data)[: len(_OURS)]
        sys.stderr.buffer.write(data)
        sys.stderr.flush()
    return beginning == _OURS


def _lines(tally: Tally) -> list[dict[str, Any]]:
    text = Path(tally.path).read_text(encoding="utf-8", errors="replace")
    return [json.loads(line) for line in text.splitlines()]


def _read(
    code: int, took_s: float, stats: list[dict[str, Any]], notes: list[dict[str, Any]]
) -> Ran:
    """One object for all processes of the program."""
    breaks = {Break(*entry): None for line in stats for entry in line["breaks"]}
    refused = {Refused(*entry): None for line in notes for entry in line["refused"]}
    return Ran(
        code,
        took_s,
        sum(line["graph_calls"] for line in stats),
        sum(line["graph_operators"] for line in stats),
        sum(line["local_operators"] for line in stats),
        list(breaks),
        _local_graphs(LocalGraph(*entry) for line in notes for entry in line["local"]),
        _operators(Operator(*entry) for line in notes for entry in line["operators"]),
        list(refused),
    )


def _local_graphs(found: Iterable[LocalGraph]) -> list[LocalGraph]:
    """Those of all processes, one a line and reason."""
    calls: Counter[tuple[str, int, str]] = Counter()
    operators: Counter[tuple[str, int, str]] = Counter()
    for entry in found:
        calls[entry[:3]] += entry.calls
        operators[entry[:3]] += entry.operators
    return [LocalGraph(*key, calls[key], operators[key]) for key in calls]


def _operators(found: Iterable[Operator]) -> list[Operator]:
    """Those of all processes, one a line and name."""
    sums: dict[tuple[str, int, str], Operator] = {}
    for entry in found:
        known = sums.get(entry[:3])
        sums[entry[:3]] = (
            entry
            if known is None
            else known._replace(
                calls=known.calls + entry.calls,
                seconds=known.seconds + entry.seconds,
                fastest_s=min(known.fastest_s, entry.fastest_s),
            )
        )
    return list(sums.values())
