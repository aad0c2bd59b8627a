"""The messages that a leader takes and sends, by kind."""

from collections import Counter
from enum import StrEnum


class Message(StrEnum):
    """One kind of message; `FROM` a gateway or node to the leader, else `TO` them."""

    QUESTION = "gateway asks for a lease"
    GRANT = "lease to a gateway"
    CANCEL = "gateway takes a question back"
    RETURN = "gateway gives a lease back"
    REPORT = "gateway reports calls (a frame)"
    CALL = "a call in such a report"
    RECALL = "recall to a gateway"
    ORDER = "order to a node"
    NODE_REPORT = "report of a node"


class MessageCounts:
    """Counts messages while it is told to; frames of many calls count once, and so do the calls."""

    def __init__(self) -> None:
        self.counting = False
        self.found: Counter[Message] = Counter()

    def add(self, message: Message, count: int = 1) -> None:
        """Some messages went."""
        if self.counting:
            self.found[message] += count

    def rate(self, message: Message, seconds: float) -> float:
        """How many of them went a second."""
        return self.found[message] / seconds

    def rate_of_messages(self, seconds: float) -> float:
        """How many messages went a second; the calls in reports are none of their own."""
        calls = self.found[Message.CALL]
        return (sum(self.found.values()) - calls) / seconds
