"""Names of functions and models as the page shows them; pure."""

from collections.abc import Mapping
from typing import TypeVar

from common.numerals import name_sort_key
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


def in_order(items: Mapping[str, _Item]) -> dict[str, _Item]:
    """GPUs or functions by id, in the order in which the page lists them."""
    return {name: items[name] for name in sorted(items, key=name_sort_key)}
