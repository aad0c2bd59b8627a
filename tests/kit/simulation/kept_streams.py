"""Streams of JetStream as a server of a simulation keeps them: what its API answers. Pure.

Only what our gateways ask for is here: messages by number or subject, subjects of which a stream
may keep the last message alone, removal, purges.
"""

import json
from base64 import b64encode
from datetime import UTC, datetime
from typing import Any

Headers = dict[str, str]
Reply = tuple[bytes, Headers]  # of a request


class StreamRefusal(Exception):
    """A request that the API refuses, with its code and its number of the error."""

    def __init__(self, code: int, number: int, text: str) -> None:
        super().__init__(text)
        self.fields = {"code": code, "err_code": number, "description": text}


def no_stream() -> StreamRefusal:
    """The refusal of a request about a stream that does not exist."""
    return StreamRefusal(404, 10059, "stream not found")


class KeptMessage:
    """One message of a stream."""

    __slots__ = ("content", "seq", "subject", "written_s")

    def __init__(self, seq: int, subject: str, content: bytes, written_s: float) -> None:
        self.seq = seq
        self.subject = subject
        self.content = content
        self.written_s = written_s


class KeptStream:
    """One stream, as it is on the server's disk."""

    def __init__(self, config: dict[str, Any], now_s: float) -> None:
        self.config = config
        self.created = _iso(now_s)
        self.messages: dict[int, KeptMessage] = {}
        self.last_seq = 0
        self._last: dict[str, int] = {}  # message of each subject

    def takes(self, subject: str) -> bool:
        """Whether messages at this subject belong here."""
        return any(_matches(subject, pattern) for pattern in self.config["subjects"])

    def write(
        self, subject: str, content: bytes, expected: int | None, now_s: float
    ) -> KeptMessage:
        """Keep one more message; of a subject only the last one, where the stream says so."""
        last = self._last.get(subject, 0)
        if expected is not None and expected != last:
            raise StreamRefusal(400, 10071, f"wrong last sequence: {last}")
        if self.config.get("max_msgs_per_subject") == 1:
            self.messages.pop(last, None)
        self.last_seq += 1
        kept = KeptMessage(self.last_seq, subject, content, now_s)
        self.messages[kept.seq] = kept
        self._last[subject] = kept.seq
        return kept

    def find(self, wanted: dict[str, Any]) -> KeptMessage:
        """The message of this number, or the last one of a subject."""
        seq = wanted.get("seq") or self._last.get(wanted.get("last_by_subj", ""), 0)
        if seq not in self.messages:
            raise StreamRefusal(404, 10037, "no message found")
        return self.messages[seq]

    def delete(self, seq: int) -> None:
        """Remove the message of this number."""
        gone = self.messages.pop(seq, None)
        if gone is None:
            raise StreamRefusal(400, 10043, f"sequence {seq} not found")
        if self._last.get(gone.subject) == seq:
            rest = [each.seq for each in self.messages.values() if each.subject == gone.subject]
            del self._last[gone.subject]
            if rest:
                self._last[gone.subject] = max(rest)

    def purge(self, pattern: str) -> int:
        """Remove all messages at these subjects; how many."""
        gone = [each.seq for each in self.messages.values() if _matches(each.subject, pattern)]
        for seq in gone:
            self.delete(seq)
        return len(gone)

    def info(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """What the API says of the stream, with its subjects where they are asked for."""
        state: dict[str, Any] = {
            "messages": len(self.messages),
            "bytes": sum(len(each.content) for each in self.messages.values()),
            "first_seq": min(self.messages, default=0),
            "last_seq": self.last_seq,
            "consumer_count": 0,
        }
        found: dict[str, Any] = {
            "config": self.config,
            "created": self.created,
            "state": state,
        }
        if "subjects_filter" in wanted:
            subjects = [each for each in self._last if _matches(each, wanted["subjects_filter"])]
            state["subjects"] = dict.fromkeys(subjects[wanted.get("offset", 0) :], 1)
            found["total"] = len(subjects)
        return found

    def asked(self, verb: str, wanted: dict[str, Any]) -> Reply:
        """What the API answers to a request about this stream."""
        if verb == "DIRECT.GET":
            return self._direct(wanted)
        if verb == "STREAM.INFO":
            return as_reply(self.info(wanted))
        if verb == "STREAM.PURGE":
            return as_reply({"success": True, "purged": self.purge(wanted.get("filter", ">"))})
        if verb == "STREAM.MSG.DELETE":
            self.delete(wanted["seq"])
            return as_reply({"success": True})
        assert verb == "STREAM.MSG.GET", f"nobody asks for {verb}"
        kept = self.find(wanted)
        content = b64encode(kept.content).decode()
        found = {"subject": kept.subject, "seq": kept.seq, "data": content}
        return as_reply({"message": {**found, "time": _iso(kept.written_s)}})

    def _direct(self, wanted: dict[str, Any]) -> Reply:
        try:
            kept = self.find(wanted)
        except StreamRefusal:
            return b"", {"Status": "404", "Description": "Message Not Found"}
        return kept.content, {"Nats-Subject": kept.subject, "Nats-Sequence": str(kept.seq)}


def as_reply(fields: dict[str, Any]) -> Reply:
    """An answer of the API."""
    return json.dumps(fields).encode(), {}


def _matches(subject: str, pattern: str) -> bool:
    """Whether a subject is one of a pattern's: `*` is any word, `>` one or more at the end."""
    words = subject.split(".")
    for place, wanted in enumerate(pattern.split(".")):
        if wanted == ">":
            return place < len(words)
        if place >= len(words) or wanted not in ("*", words[place]):
            return False
    return len(words) == len(pattern.split("."))


def _iso(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).isoformat().replace("+00:00", "Z")
