"""Runs a program as `gpufaas exec` does, and reads the notes of the shim and of our probe."""

import asyncio
import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gpufaas.child_programs import SignalForwarding, killed_at_end
from gpufaas.errors import CommandError
from gpufaas.shim_counts import ReportFile
from torch_shim.process_report import GraphBreak

_PROBE = Path(__file__).parent / "probe"
_OURS = b"gpufaas exec: "
_EXIT_SIGNAL = 128


class LocalGraph(NamedTuple):
    """A captured graph that ran in the function."""

    file: str
    line: int
    reason: str
    operators: int


class OutsideOperator(NamedTuple):
    """An operator that ran outside of any graph, at one line."""

    file: str
    line: int
    name: str
    calls: int
    seconds: float
    fastest_s: float


class RefusedCall(NamedTuple):
    """A call that the shim cannot redirect."""

    file: str
    line: int
    call: str
    remedy: str


@dataclass(frozen=True, slots=True)
class TrialRun:
    """The outcome of a run of the program."""

    code: int
    took_s: float
    graph_calls: int
    graph_operators: int
    local_operators: int
    breaks: Sequence[GraphBreak] = ()
    local: Sequence[LocalGraph] = ()
    operators: Sequence[OutsideOperator] = ()
    refused: Sequence[RefusedCall] = ()


def run_program(
    program: Sequence[str], options: Sequence[str], environment: Mapping[str, str], *, quiet: bool
) -> TrialRun:
    """Run the program to its end; `quiet` sends its output to our standard error."""
    return asyncio.run(_run(program, options, environment, quiet=quiet))


async def _run(
    program: Sequence[str], options: Sequence[str], environment: Mapping[str, str], *, quiet: bool
) -> TrialRun:
    # -P: a user's folder `common` or `tests` here is not ours.
    command = [sys.executable, "-P", "-m", "gpufaas", "exec", *options, "--", *program]
    with SignalForwarding() as signals, ReportFile() as stats, ReportFile() as notes:
        if signals.pending is not None:
            raise CommandError(f"ended by signal {signals.pending}")
        start_s = asyncio.get_running_loop().time()
        child = await asyncio.create_subprocess_exec(
            *command,
            env=_environment(environment, stats, notes),
            stdout=sys.stderr.fileno() if quiet else None,
            stderr=asyncio.subprocess.PIPE,
        )
        signals.forward_to(child)
        async with killed_at_end(child):
            never_ran = await _pass_on(child.stderr)
            code = await child.wait()
        took_s = asyncio.get_running_loop().time() - start_s
        if code and never_ran:
            raise CommandError("the program did not run")
        return _read(
            code if code >= 0 else _EXIT_SIGNAL - code, took_s, stats.reports(), notes.reports()
        )


def _environment(
    environment: Mapping[str, str], stats: ReportFile, notes: ReportFile
) -> dict[str, str]:
    """Our environment, with files for the shim's stats and for the probe's notes."""
    path = environment.get("PYTHONPATH")
    return {
        **environment,
        "PYTHONPATH": f"{_PROBE}{os.pathsep}{path}" if path else str(_PROBE),
        "GPUFAAS_STATS": stats.path,
        "GPUFAAS_CHECK": notes.path,
    }


async def _pass_on(errors: asyncio.StreamReader | None) -> bool:
    """Copy the program's errors; whether `exec` wrote the first of them: then no program ran."""
    assert errors is not None
    beginning = b""
    while data := await errors.read(1 << 16):
        beginning = (beginning + data)[: len(_OURS)]
        sys.stderr.buffer.write(data)
        sys.stderr.flush()
    return beginning == _OURS


def _read(
    code: int, took_s: float, stats: list[dict[str, Any]], notes: list[dict[str, Any]]
) -> TrialRun:
    breaks = {GraphBreak(*entry): None for line in stats for entry in line["breaks"]}
    refused = {RefusedCall(*entry): None for line in notes for entry in line["refused"]}
    return TrialRun(
        code,
        took_s,
        sum(line["graph_calls"] for line in stats),
        sum(line["graph_operators"] for line in stats),
        sum(line["local_operators"] for line in stats),
        list(breaks),
        _local_graphs(LocalGraph(*entry) for line in notes for entry in line["local"]),
        _operators(OutsideOperator(*entry) for line in notes for entry in line["operators"]),
        list(refused),
    )


def _local_graphs(graphs: Iterable[LocalGraph]) -> list[LocalGraph]:
    """Summed over processes by line and reason."""
    operators: Counter[tuple[str, int, str]] = Counter()
    for entry in graphs:
        operators[entry[:3]] += entry.operators
    return [LocalGraph(*key, count) for key, count in operators.items()]


def _operators(operators: Iterable[OutsideOperator]) -> list[OutsideOperator]:
    """Summed over processes by line and name."""
    sums: dict[tuple[str, int, str], OutsideOperator] = {}
    for entry in operators:
        total = sums.get(entry[:3])
        sums[entry[:3]] = (
            entry
            if total is None
            else total._replace(
                calls=total.calls + entry.calls,
                seconds=total.seconds + entry.seconds,
                fastest_s=min(total.fastest_s, entry.fastest_s),
            )
        )
    return list(sums.values())
