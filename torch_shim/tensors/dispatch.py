"""The table of operators that need special handling on handles; filled at their first use."""

from collections.abc import Callable
from typing import Any, TypeAlias

Operator: TypeAlias = Callable[..., Any]
Handler: TypeAlias = Callable[[Operator, tuple[Any, ...], dict[str, Any]], Any]
Classifier: TypeAlias = Callable[[Operator], Handler | None]


class Special(dict[Operator, Handler | None]):
    """Operator to handler, or None for no special handling; an operator is classified once."""

    def __init__(self) -> None:
        super().__init__()
        self.classifiers: list[Classifier] = []

    def __missing__(self, operator: Operator) -> Handler | None:
        handler = None
        for classify in self.classifiers:
            handler = classify(operator)
            if handler is not None:
                break
        self[operator] = handler
        return handler


special = Special()


def handles(*operators: Operator) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        for operator in operators:
            special[operator] = handler
        return handler

    return register


def names(text: str) -> frozenset[str]:
    """Return the words of a text; for long lists of operator names."""
    return frozenset(text.split())
