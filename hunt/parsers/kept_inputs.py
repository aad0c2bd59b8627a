"""The inputs that are kept beside the tests: those that reach most, and those that broke a parser.

A line of a file is one input: the target's name, and its bytes as text, or in base64 where they are
none, and compressed where they are many. A regression also says what it broke.
"""

import base64
import json
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from hunt.parsers.arc_coverage import Arc, ArcCoverage
from hunt.parsers.parser_target import Target, fault_of

_FOLDER = Path(__file__).with_name("inputs")
CORPUS, REGRESSIONS = _FOLDER / "corpus.jsonl", _FOLDER / "regressions.jsonl"
_MOST_KEPT = 40  # of one target
_LONGEST = 4 << 10
_PLAIN_BYTES = 500


def kept_of(path: Path) -> dict[str, list[bytes]]:
    """The inputs in a file, by target."""
    found: dict[str, list[bytes]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        found.setdefault(entry["target"], []).append(_bytes_of(entry))
    return found


def write_corpus(inputs: dict[str, list[bytes]]) -> None:
    """Replace the corpus."""
    lines = [_line(name, data) for name in sorted(inputs) for data in inputs[name]]
    CORPUS.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def add_regression(target: str, data: bytes, what: str) -> None:
    """Keep an input that broke a parser, and what it did."""
    with REGRESSIONS.open("a", encoding="utf-8") as file:
        file.write(f"{_line(target, data, what)}\n")


def fewest(target: Target, inputs: Iterable[bytes], folders: Sequence[str]) -> list[bytes]:
    """Some of the inputs, which together reach what all do beyond the seeds; small ones first."""
    reached = ArcCoverage(folders)
    for seed in target.seeds():
        reached.is_new(lambda seed=seed: fault_of(target, seed))  # type: ignore[misc] # bound now
    known = reached.arcs()
    by_input: dict[bytes, set[Arc]] = {}
    for data in sorted(set(inputs), key=lambda data: (len(data), data)):
        if len(data) <= _LONGEST:
            own = ArcCoverage(folders)
            own.is_new(lambda data=data: fault_of(target, data))  # type: ignore[misc] # bound now
            by_input[data] = own.arcs() - known
    chosen: list[bytes] = []
    while by_input and len(chosen) < _MOST_KEPT:
        best = max(by_input, key=lambda data: (len(by_input[data]), -len(data)))
        gained = by_input.pop(best)
        if not gained:
            break
        chosen.append(best)
        by_input = {data: arcs - gained for data, arcs in by_input.items()}
    return chosen


def _line(target: str, data: bytes, what: str = "") -> str:
    entry = {"target": target} | ({"what": what} if what else {})
    if len(data) > _PLAIN_BYTES:
        return json.dumps(entry | {"zlib": base64.b64encode(zlib.compress(data)).decode()})
    try:
        return json.dumps(entry | {"text": data.decode()})
    except UnicodeDecodeError:
        return json.dumps(entry | {"base64": base64.b64encode(data).decode()})


def _bytes_of(entry: dict[str, str]) -> bytes:
    if "zlib" in entry:
        return zlib.decompress(base64.b64decode(entry["zlib"]))
    return base64.b64decode(entry["base64"]) if "base64" in entry else entry["text"].encode()
