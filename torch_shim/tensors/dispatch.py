"""Which operators need more than being run on the CPU's storage: one table, filled at first use."""

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

Operator: TypeAlias = Callable[..., Any]
Handler: TypeAlias = Callable[[Operator, tuple[Any, ...], dict[str, Any]], Any]
Classifier: TypeAlias = Callable[[Operator], Handler | None]


class Special(dict[Operator, Handler | None]):
    """Operator to handler; None runs it as it is. An unknown operator is classified once."""

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
    """Decorates the handler of some operators."""

    def register(handler: Handler) -> Handler:
        for operator in operators:
            special[operator] = handler
        return handler

    return register


def names(text: str) -> frozenset[str]:
    """The words of a text: long lists of operators read better so."""
    return frozenset(text.split())


def existing(owner: object, names: Iterable[str]) -> list[Any]:
    """Those attributes of an object that this version of PyTorch has."""
    return [getattr(owner, name) for name in names if hasattr(owner, name)]
