"""`gpufaas replay`: a recorded live run in a fresh core, which must do the same again.

With `--policy` it says what other policies would have made of that traffic (`what_if.py`).
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from gpufaas.arguments import Commands
from gpufaas.errors import CommandError
from gpufaas.what_if import as_json, chosen_policies, side_by_side, what_if
from scheduler.core import Core
from scheduler.errors import BadRecording
from scheduler.events import Event
from scheduler.recording import Beginning, Step, digest, parsed

_MOST_SHOWN = 5


@dataclass(slots=True)
class Replayed:
    """What a recording holds, and the lines at which the fresh core answered otherwise."""

    terms: int = 0
    events: int = 0
    seconds: float = 0.0
    by_kind: Counter[str] = field(default_factory=Counter)
    differing_lines: list[int] = field(default_factory=list)


def add_parser(commands: Commands) -> None:
    """Describe the command's options."""
    parser = commands.add_parser("replay", help="replay a recorded live run in a fresh core")
    parser.add_argument("file", help="as `gpufaas scheduler --record FILE` wrote it")
    parser.add_argument(
        "--policy",
        nargs="+",
        metavar="P",
        help="what these policies (or all) would have done with that traffic, simulated",
    )
    parser.add_argument("--parameters", metavar="NAME=N,...", help="of those policies")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    path = Path(options.file)
    if options.policy:
        chosen = chosen_policies(options.policy, options.parameters)
        found_otherwise = what_if(path, (entry for _, entry in _entries(path)), chosen)
        print(as_json(found_otherwise) if options.json else side_by_side(found_otherwise))
        return 0
    if options.parameters:
        raise CommandError("--parameters are of a policy: name it with --policy")
    found = replay(path)
    if options.json:
        print(json.dumps(asdict(found), indent=1))
    else:
        print(in_words(found))
    return int(bool(found.differing_lines))


def in_words(found: Replayed) -> str:
    """The outcome for a person."""
    kinds = ", ".join(f"{count} {kind}" for kind, count in found.by_kind.most_common())
    lines = [f"{found.events} events in {found.terms} terms, {found.seconds:.1f} s: {kinds}"]
    if not found.differing_lines:
        lines.append("A fresh core answers every one of them with the same actions.")
        return "\n".join(lines)
    first = ", ".join(map(str, found.differing_lines[:_MOST_SHOWN]))
    lines.append(f"{len(found.differing_lines)} answers differ, the first at line {first}.")
    return "\n".join(lines)


def replay(path: Path) -> Replayed:
    """Every term of a recording in a core of its own."""
    found, core, began_s = Replayed(), None, 0.0
    for number, entry in _entries(path):
        if isinstance(entry, Beginning):
            core, began_s = entry.core(), -1.0
            found.terms += 1
            continue
        if core is None:
            raise BadRecording(f"{path}, line {number}: an event before the beginning of a term")
        if began_s >= 0:
            found.seconds += entry.at_s - began_s
        began_s = entry.at_s
        found.events += 1
        found.by_kind[type(entry.event).__name__] += 1
        if _answer(core, entry.event, entry.at_s) != entry.digest:
            found.differing_lines.append(number)
    if core is None:
        raise BadRecording(f"{path}: nothing is recorded there")
    return found


def _answer(core: Core, event: Event, at_s: float) -> str:
    return digest(core.handle(event, at_s))


def _entries(path: Path) -> Iterator[tuple[int, Beginning | Step]]:
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
        raise CommandError(f"{path}: {error}") from error
