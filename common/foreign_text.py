"""Texts of others for terminals and logs, which obey control characters; pure."""

from typing import Any


def plain(text: object, instead: str = "?") -> str:
    """Foreign text, with another one `instead` of each control character."""
    return "".join(letter if letter.isprintable() else instead for letter in str(text))


def printable(answer: Any) -> Any:
    """A server's answer, with foreign texts as `plain` shows them."""
    if isinstance(answer, dict):
        return {name: printable(value) for name, value in answer.items()}
    if isinstance(answer, list):
        return [printable(value) for value in answer]
    return plain(answer) if isinstance(answer, str) else answer
