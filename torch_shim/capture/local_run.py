"""Runs a captured graph on the function's own processor: the same steps without GPU devices."""

from typing import Any

import torch
from torch import fx

from torch_shim.missing_kernels import substitution

_TO_DEVICE = frozenset({"cuda", "cpu"})


def without_gpu(module: fx.GraphModule) -> fx.GraphModule:
    """Return the graph, and in it the branches and bodies of loops, without GPU devices."""
    graph = fx.Graph()
    copied = graph.graph_copy(module.graph, {})
    graph.output(copied)
    for node in list(graph.nodes):
        if node.op == "call_method" and node.target in _TO_DEVICE:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
            continue
        _substitute(node)
        node.args = fx.node.map_aggregate(node.args, _processor)
        node.kwargs = fx.node.map_aggregate(node.kwargs, _processor)
    found = fx.GraphModule(module, graph)
    found.meta.update(module.meta)
    for name, part in list(found.named_children()):
        if isinstance(part, fx.GraphModule):
            setattr(found, name, without_gpu(part))
    return found


def _substitute(node: fx.Node) -> None:
    """Have an operator that only CUDA has for some dtypes computed all the same."""
    operator, name = substitution.operator_of(node)
    if operator is not None and substitution.has_substitute(name):
        node.op, node.target = "call_function", substitution.with_substitute(operator, name)


def _processor(value: Any) -> Any:
    """Replace CUDA devices and autocast's CUDA device names with the CPU's."""
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")):
        return "cpu"
    return value
