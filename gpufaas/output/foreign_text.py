"""Texts of others for a terminal, which obeys control characters; pure."""

from typing import Any


def plain(text: object) -> str:
    """Foreign text without control characters."""
    return "".join(letter if letter.isprintable() else "?" for letter in str(text))


def printable(answer: Any) -> Any:
    """A server's answer, with foreign texts as `plain` shows them."""
    if isinstance(answer, dict):
        return {name: printable(value) for name, value in answer.items()}
    if isinstance(answer, list):
        return [printable(value) for value in answer]
    return plain(answer) if isinstance(answer, str) else answer
