"""The runtime's log lines about calls, on standard error, apart from the function's prints."""

import json
import sys
from collections.abc import Callable
from datetime import UTC, datetime

# Logs a text about a call: the call's id, its trace's id, the text.
LogLine = Callable[[str, str, str], None]


def write_plainly(text: str, call_id: str, trace_id: str) -> None:
    """A plain line."""
    del trace_id
    _write(f"[{''.join(filter(str.isprintable, call_id))}] {text}")


def write_as_json(text: str, call_id: str, trace_id: str) -> None:
    """A line of JSON, in the format of our other processes."""
    at = datetime.now(UTC).isoformat(timespec="milliseconds").removesuffix("+00:00")
    fields = {"time": f"{at}Z", "level": "error", "logger": "runtime", "message": text}
    found = {"call_id": call_id, "trace_id": trace_id}
    _write(json.dumps(fields | {name: value for name, value in found.items() if value}))


def _write(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
