"""The format of log lines: plain text, or a JSON object a line."""

import json
import logging
import re
from collections.abc import Mapping
from datetime import UTC, datetime

from common.telemetry.work_context import ABOUT
from gpufaas.errors import CommandError

FORMATS = ("text", "json")
PLAIN = "%(asctime)s %(levelname)s %(name)s: %(message)s"

_CALL = re.compile(r"call (\S+): ")
# Facts that a log call may give with `extra`, beside those of the work at hand.
_FACTS = ("call_id", "trace_id", "function", "request", "lease")


# Others' texts are in messages: no control character of theirs reaches a terminal.
_ESCAPED = {
    code: f"\\u{code:04x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"
}


class PlainLines(logging.Formatter):
    """A message a line; its further lines and tracebacks are indented: none can look like two."""

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).translate(_ESCAPED).replace("\n", "\n    ")


class JsonLines(logging.Formatter):
    """One JSON object a line, with the call, request and lease in fields."""

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        fields = {
            "time": at.removesuffix("+00:00") + "Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": message,
            **_facts(record, message),
        }
        if record.exc_info:
            fields["trace"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False).translate(_ESCAPED)


def configure_logs(level: str, form: str) -> None:
    """Write log lines from this level on to standard error; CommandError for an unknown form."""
    if form not in FORMATS:
        raise CommandError(f"log_format: {form!r}: one of {', '.join(FORMATS)} is expected")
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if form == "json" else PlainLines(PLAIN))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def _facts(record: logging.LogRecord, message: str) -> Mapping[str, str]:
    """The line's own facts, with those of the work at hand unless the two contradict each other."""
    own = {name: str(getattr(record, name)) for name in _FACTS if hasattr(record, name)}
    call = _CALL.match(message)
    if call is not None:
        own.setdefault("call_id", call[1])
    work = ABOUT.get()
    facts = {} if work is None else dict(work.facts())
    if any(facts.get(name, value) != value for name, value in own.items()):
        return own
    return facts | own
