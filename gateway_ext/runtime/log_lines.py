"""The runtime's own lines about calls, on standard error; a function's prints are its own."""

import json
import sys
from collections.abc import Callable
from datetime import UTC, datetime

# Says something of the call of this id, which belongs to the trace of that one.
Say = Callable[[str, str, str], None]


def say_plainly(text: str, call_id: str, trace_id: str) -> None:
    """For people."""
    del trace_id
    _write(f"[{call_id}] {text}")


def say_as_json(text: str, call_id: str, trace_id: str) -> None:
    """For machines: one line, as our other processes write theirs."""
    at = datetime.now(UTC).isoformat(timespec="milliseconds").removesuffix("+00:00")
    said = {"time": f"{at}Z", "level": "error", "logger": "runtime", "message": text}
    found = {"call_id": call_id, "trace_id": trace_id}
    _write(json.dumps(said | {name: value for name, value in found.items() if value}))


def _write(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
