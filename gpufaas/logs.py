"""How the log lines of all our processes look: plain for people, or JSON for machines."""

import json
import logging
import re
from collections.abc import Mapping
from datetime import UTC, datetime

from gpufaas.errors import CommandError
from scheduler.about import ABOUT

FORMATS = ("text", "json")
PLAIN = "%(asctime)s %(levelname)s %(name)s: %(message)s"

_CALL = re.compile(r"call (\S+): ")
# What a line may be said to be about by whoever writes it (`extra`), beside the work at hand.
_FACTS = ("call_id", "trace_id", "function", "request", "lease")


class JsonLines(logging.Formatter):
    """One JSON object a line; what the line is about are fields of their own."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        message = record.getMessage()
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        said = {
            "time": at.removesuffix("+00:00") + "Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": message,
            **_facts(record, message),
        }
        if record.exc_info:
            said["trace"] = self.formatException(record.exc_info)
        return json.dumps(said, ensure_ascii=False)


def configure_logs(level: str, form: str, plain: str = PLAIN) -> None:
    """Write log lines from this level on to standard error; CommandError for an unknown form."""
    if form not in FORMATS:
        raise CommandError(f"log_format: {form!r}: one of {', '.join(FORMATS)} is wanted")
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if form == "json" else logging.Formatter(plain))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def _facts(record: logging.LogRecord, message: str) -> Mapping[str, str]:
    """What the line names itself goes before what the work at hand is about.

    A line about another request or call than that is not about it at all.
    """
    own = {name: str(getattr(record, name)) for name in _FACTS if hasattr(record, name)}
    call = _CALL.match(message)
    if call is not None:
        own.setdefault("call_id", call[1])
    work = ABOUT.get()
    facts = {} if work is None else dict(work.facts())
    if any(facts.get(name, value) != value for name, value in own.items()):
        return own
    return facts | own
