"""Runs a captured graph on the function's own processor: the same steps without GPU devices."""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

_TO_DEVICE = frozenset({"cuda", "cpu"})


def on_this_processor(module: fx.GraphModule) -> Callable[..., Any]:
    """Return the graph as a function over CPU tensors."""
    graph = fx.Graph()
    copied = graph.graph_copy(module.graph, {})
    graph.output(copied)
    for node in list(graph.nodes):
        if node.op == "call_method" and node.target in _TO_DEVICE:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
            continue
        node.args = fx.node.map_aggregate(node.args, _processor)
        node.kwargs = fx.node.map_aggregate(node.kwargs, _processor)
    return fx.GraphModule(module, graph).forward


def _processor(value: Any) -> Any:
    """Replace CUDA devices and autocast's CUDA device names with the CPU's."""
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")):
        return "cpu"
    return value
