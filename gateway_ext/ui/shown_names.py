"""Names of functions and models as the page shows them; pure."""

from collections.abc import Iterable, Mapping
from typing import TypeVar

from gateway_ext.model import DEFAULT_NAMESPACE

_Item = TypeVar("_Item")


def shown_function(name: str) -> str:
    """The scheduler's `namespace/name` as OpenFaaS writes it: `name`, or `name.namespace`."""
    namespace, slash, rest = name.partition("/")
    if not slash:
        return name
    return rest if namespace == DEFAULT_NAMESPACE else f"{rest}.{namespace}"


def full_name(name: str) -> str:
    """The scheduler's `namespace/name` as the gateway's id of a function: `name.namespace`."""
    namespace, _, rest = name.partition("/")
    return f"{rest}.{namespace}"


def short_model(model: str) -> str:
    """The name of a model without a known function: the beginning of its digest."""
    return model.rpartition("/")[2][:8]


def name_sort_key(name: str) -> list[tuple[int, int, str]]:
    """A key that sorts node-9 before node-10."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in _parts(name)]


def in_order(items: Mapping[str, _Item]) -> dict[str, _Item]:
    """GPUs or functions by id, in the order in which the page lists them."""
    return {name: items[name] for name in sorted(items, key=name_sort_key)}


def _parts(name: str) -> Iterable[str]:
    """Digits and the text between them, as separate parts."""
    part = ""
    for letter in name:
        if part and letter.isdecimal() != part[-1].isdecimal():
            yield part
            part = ""
        part += letter
    if part:
        yield part
