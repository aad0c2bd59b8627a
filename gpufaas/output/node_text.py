"""A GPU manager's node as text: its GPUs, its weights, and what went between host and GPUs."""

from collections.abc import Iterator
from typing import Any

from common.numerals import format_size
from gpufaas.output.columns import columns

_HEAD = ("GPU", "MODELS", "GRANTED", "OF")
_TRANSFERS = ("TRANSFERS", "DIRECTION", "CLASS", "BYTES", "WAITED")


def node_text(node: dict[str, Any]) -> str:
    """Tables of the node's GPUs, and of their transfers where these are counted."""
    store = node["store"]
    lines = [
        f"node {node['node']}   policy {node['policy']}   leases {node['leases']}   "
        f"waiting {node['waiting']}   hits {node['hits']}   misses {node['misses']}",
        f"weights in memory {format_size(store['bytes'])} of {format_size(store['budget_bytes'])}, "
        f"on disk {format_size(store['disk_bytes'])}",
        "",
        columns([_HEAD, *(_gpu(gpu) for gpu in node["gpus"])]),
    ]
    moved = [row for gpu in node["gpus"] for row in _moved(gpu)]
    return "\n".join([*lines, "", columns([_TRANSFERS, *moved])] if moved else lines)


def _gpu(gpu: dict[str, Any]) -> tuple[str, ...]:
    granted, whole = format_size(gpu["granted_bytes"]), format_size(gpu["memory_bytes"])
    return gpu["id"], str(gpu["models"]), granted, whole


def _moved(gpu: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield a line for each direction and class in which anything was moved."""
    for row in gpu["transfers"]:
        if row["bytes"]:
            size, waited = format_size(row["bytes"]), f"{row['waited_s']:.3f} s"
            yield gpu["id"], row["direction"].replace("_", " "), row["class"], size, waited
