"""The state of the page as a watcher of its events has it, in Python (docs/page.md)."""

from collections.abc import Mapping
from typing import Any

from common.numerals import name_sort_key

State = Mapping[str, Any]

_ID_FIELDS = {"gpus": "id", "functions": "id", "decisions": "request"}


def changed(state: State, content: Mapping[str, Any]) -> State:
    """The state after an event `change` or `ping`."""
    new = dict(state)
    for section, value in content.items():
        if section == "history":
            new["history"] = _longer(state["history"], value["added"])
        elif section in _ID_FIELDS:
            new[section] = _with_items(section, state[section], value)
        else:
            new[section] = value
    return new


def _longer(history: Mapping[str, Any], added: Mapping[str, list[Any]]) -> Mapping[str, Any]:
    points = history["points"]
    series = {
        kind: (values + added.get(kind, []))[-points:] for kind, values in history["series"].items()
    }
    return {**history, "series": series}


def _with_items(
    section: str, before: list[Mapping[str, Any]], content: Mapping[str, Any]
) -> list[Mapping[str, Any]]:
    name = _ID_FIELDS[section]
    items = {item[name]: item for item in before}
    for gone in content["removed"]:
        items.pop(gone, None)
    items.update((item[name], item) for item in content["replaced"])
    if section == "decisions":
        return sorted(items.values(), key=lambda item: -item["number"])
    return sorted(items.values(), key=lambda item: name_sort_key(item[name]))
