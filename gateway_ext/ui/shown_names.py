"""Names of functions and models as the page shows them; pure."""

from collections.abc import Iterable, Mapping
from typing import TypeVar

from common.numerals import name_sort_key
from gateway_ext.model import DEFAULT_NAMESPACE
from gateway_ext.ui.state import Json

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


_MOST_LABELS = 10_000


class ModelLabels:
    """A model keeps the label of the first function seen to use it, so that labels stay.

    Only once the gateway has no such function any more does a present function take its place.
    """

    def __init__(self) -> None:
        self._labels: dict[str, str] = {}
        self._seen: Mapping[str, Json] = {}
        self._present: frozenset[str] = frozenset()
        self._changed: set[str] = set()

    def of(self, model: str) -> str:
        return self._labels.get(model) or short_model(model)

    def see(self, functions: Mapping[str, Json]) -> None:
        """Learn from the gateway's functions that changed; from all once one came or went."""
        before, self._seen = self._seen, functions
        if before.keys() != functions.keys():
            before, self._present = {}, frozenset(map(_shown, functions.values()))
        for function_id, function in functions.items():
            if function["models"] and before.get(function_id) is not function:
                self.learn(function["models"], _shown(function))

    def learn(self, models: Iterable[str], function: str | None) -> None:
        if function is None:
            return
        if len(self._labels) > _MOST_LABELS:
            self._labels.clear()
        for model in models:
            held = self._labels.get(model)
            if held is None or self._replaces(function, held):
                self._labels[model] = function
                self._changed.add(model)

    def relabelled(self, gpus: dict[str, Json]) -> dict[str, Json]:
        """The GPUs with the labels that were learned since the last call of this method."""
        changed, self._changed = self._changed, set()
        if not changed:
            return gpus
        return {gpu_id: self._relabelled(gpu, changed) for gpu_id, gpu in gpus.items()}

    def _replaces(self, function: str, held: str) -> bool:
        return function in self._present and held not in self._present

    def _relabelled(self, gpu: Json, changed: set[str]) -> Json:
        if all(resident["model"] not in changed for resident in gpu["residents"]):
            return gpu
        residents = [
            {**resident, "label": self.of(resident["model"])} for resident in gpu["residents"]
        ]
        return {**gpu, "residents": residents}


def _shown(function: Json) -> str:
    return shown_function(f"{function['namespace']}/{function['name']}")
