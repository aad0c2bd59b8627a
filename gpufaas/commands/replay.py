"""`gpufaas replay`: a recorded live run in a fresh core, which must take the same actions.

With `--policy` the recorded traffic is simulated under other policies.
"""

import argparse
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from gpufaas.errors import CommandError
from gpufaas.options.shared import Commands, print_answer
from gpufaas.output.policy_comparison import (
    as_json,
    chosen_policies,
    compare_policies,
    side_by_side,
)
from scheduler.model.errors import BadRecording
from scheduler.recording import Beginning, RecordedStep, digest, parsed

_MOST_SHOWN = 5


@dataclass(slots=True)
class ReplayResult:
    """A recording's contents, and the lines at which the fresh core took other actions."""

    terms: int = 0
    events: int = 0
    seconds: float = 0.0
    by_kind: Counter[str] = field(default_factory=Counter)
    differing_lines: list[int] = field(default_factory=list)


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("replay", help="replay a recorded live run in a fresh core")
    parser.add_argument("file", help="as `gpufaas scheduler --record FILE` wrote it")
    others = "what these policies (or all) would have done with that traffic, simulated"
    parser.add_argument("--policy", nargs="+", metavar="P", help=others)
    parser.add_argument("--parameters", metavar="NAME=N,...", help="of those policies")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    path = Path(options.file)
    if options.policy:
        chosen = chosen_policies(options.policy, options.parameters)
        comparison = compare_policies(path, (entry for _, entry in _entries(path)), chosen)
        print(as_json(comparison) if options.json else side_by_side(comparison))
        return 0
    if options.parameters:
        raise CommandError("--parameters are of a policy: name it with --policy")
    result = replay(path)
    answer = asdict(result) | {"by_kind": dict(result.by_kind)}  # of a Counter asdict counts pairs
    print_answer(answer, options, lambda _: replay_text(result))
    return int(bool(result.differing_lines))


def replay_text(result: ReplayResult) -> str:
    kinds = ", ".join(f"{count} {kind}" for kind, count in result.by_kind.most_common())
    lines = [f"{result.events} events in {result.terms} terms, {result.seconds:.1f} s: {kinds}"]
    if not result.differing_lines:
        lines.append("A fresh core answers every one of them with the same actions.")
        return "\n".join(lines)
    first = ", ".join(map(str, result.differing_lines[:_MOST_SHOWN]))
    lines.append(f"{len(result.differing_lines)} answers differ, the first at line {first}.")
    return "\n".join(lines)


def replay(path: Path) -> ReplayResult:
    """Replay every term of a recording in a fresh core."""
    result, core, began_s = ReplayResult(), None, 0.0
    for number, entry in _entries(path):
        if isinstance(entry, Beginning):
            core, began_s = entry.core(), -1.0
            result.terms += 1
            continue
        if core is None:
            raise BadRecording(f"{path}, line {number}: an event before the beginning of a term")
        if began_s >= 0:
            result.seconds += entry.at_s - began_s
        began_s = entry.at_s
        result.events += 1
        result.by_kind[type(entry.event).__name__] += 1
        if digest(core.handle(entry.event, entry.at_s)) != entry.digest:
            result.differing_lines.append(number)
    if core is None:
        raise BadRecording(f"{path}: the recording is empty")
    return result


def _entries(path: Path) -> Iterator[tuple[int, Beginning | RecordedStep]]:
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.endswith("\n"):
                    return  # the process was killed while it wrote
                try:
                    yield number, parsed(line)
                except BadRecording as error:
                    raise BadRecording(f"{path}, line {number}: {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"{path}: {getattr(error, 'strerror', error)}") from error
