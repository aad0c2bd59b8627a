"""Calls of NumPy in a graph, which Dynamo replaces by calls of PyTorch's own NumPy.

What depends on nothing but constants is computed once, here: it becomes a tensor of the program.
"""

import operator
from typing import Any

import torch
from torch import fx
from torch._dynamo import utils
from torch._numpy import random

_METHODS, _OPERATORS = utils.numpy_method_wrapper, utils.numpy_operator_wrapper
_ATTRIBUTE = utils.numpy_attr_wrapper
_RANDOM = random.__name__
_MOST_BYTES = 1 << 20  # of one constant: a program is sent to every worker that runs it


def name_of(target: Any) -> str | None:
    """Return the name for a program of a function of NumPy, if this is one and takes no method."""
    if isinstance(target, utils.numpy_to_tensor_wrapper) and not draws(target):
        return f"n:{target.f.__name__}"
    if isinstance(target, _OPERATORS) and getattr(operator, target.op.__name__, None) is target.op:
        return f"n:operator.{target.op.__name__}"
    return None


def constant_results(module: fx.GraphModule) -> dict[fx.Node, torch.Tensor]:
    """Return the values of the nodes that compute with NumPy from constants alone."""
    values: dict[fx.Node, Any] = {}
    for node in module.graph.nodes:
        if _is_numpy(node) and all(used in values for used in node.all_input_nodes):
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)
    return {node: value for node, value in values.items() if _fits(value)}


def _fits(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.nbytes <= _MOST_BYTES


def _is_numpy(node: fx.Node) -> bool:
    target: Any = node.target
    if isinstance(target, utils.numpy_to_tensor_wrapper):
        return not draws(target)
    return isinstance(target, (_METHODS, _OPERATORS)) or target is _ATTRIBUTE


def draws(target: Any) -> bool:
    """Whether this draws random numbers: PyTorch's own NumPy does not draw what NumPy does."""
    function = getattr(target, "f", None)
    return str(getattr(function, "__module__", "")) == _RANDOM
