"""How the gateway's log lines look: plain for people, or JSON for machines."""

import json
import logging
import re
from datetime import UTC, datetime

PLAIN = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_CALL = re.compile(r"call (\S+): ")


class JsonLines(logging.Formatter):
    """One JSON object a line; the call that a line is about is a field of its own."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        message = record.getMessage()
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        said = {
            "time": at.removesuffix("+00:00") + "Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": message,
        }
        call = _CALL.match(message)
        if call is not None:
            said["call_id"] = call[1]
        if record.exc_info:
            said["trace"] = self.formatException(record.exc_info)
        return json.dumps(said, ensure_ascii=False)


def configure_logs(level: str, *, as_json: bool) -> None:
    """Write log lines from this level on to standard error; ValueError for an unknown level."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if as_json else logging.Formatter(PLAIN))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
