"""torch.func: tensors that a transform passes to the user's function keep their device."""

from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
from torch._functorch import autograd_function, eager_transforms, vmap
from torch.fx.experimental import proxy_tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from torch_shim.patching import replace, set_attribute
from torch_shim.redirected_device import CPU
from torch_shim.tensors.absent_bytes import bring
from torch_shim.tensors.dispatch import names
from torch_shim.tensors.handles import CudaParameter, CudaTensor, Tensor, become_cuda

_ONE_TENSOR = names(
    "_add_batch_dim _remove_batch_dim _wrap_for_grad _unwrap_for_grad _wrap_functional_tensor "
    "_unwrap_functional_tensor get_unwrapped"
)
_OF_NUMBERS = torch.ops.aten.lift_fresh_copy.default  # what `torch.tensor` leaves in a trace


def install() -> None:
    """Make the functions that wrap and unwrap tensors for a transform preserve the class."""
    for module in (vmap, eager_transforms, autograd_function):
        for name in _ONE_TENSOR:
            replace(module, name, _with_bytes)
    replace(torch.autograd.forward_ad, "make_dual", _keeping_class)
    replace(torch.autograd.forward_ad, "unpack_dual", _keeping_class)
    # Tensors that a trace by make_fx, as in `linearize`, meets and was not given: constants.
    constants = (*proxy_tensor.HANDLED_TYPES, CudaTensor, CudaParameter)
    set_attribute(proxy_tensor, "HANDLED_TYPES", constants)
    replace(eager_transforms, "lazy_dynamo_disallow", _linearize_on_gpu)


def _with_bytes(native: Callable[..., Any]) -> Callable[..., Any]:
    """Fetch a tensor's bytes first: operators on wrapped tensors do not show that they read it."""
    convert = _keeping_class(native)

    def fetch_and_convert(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            bring((tensor,))
        return convert(tensor, *args, **kwargs)

    return fetch_and_convert


def _keeping_class(native: Callable[..., Any]) -> Callable[..., Any]:
    def convert(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        result = native(tensor, *args, **kwargs)
        if isinstance(tensor, CudaTensor):
            for value in result if isinstance(result, tuple) else (result,):
                if isinstance(value, Tensor):
                    become_cuda(value)
        return result

    return convert


def _linearize_on_gpu(native: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap what `linearize` traces by: what a derivative makes is where its tensors are."""

    def lazy_dynamo_disallow(function: Any) -> Any:
        disallowed = native(function)
        return _traced_on_gpu(disallowed) if function is proxy_tensor.make_fx else disallowed

    return lazy_dynamo_disallow


def _traced_on_gpu(make_fx: Callable[..., Any]) -> Callable[..., Any]:
    def make(function: Any) -> Callable[..., Any]:
        def trace(tangents: tuple[Any, ...]) -> Any:
            noting = _NodesOnCpu()

            def noted(tangents: tuple[Any, ...]) -> Any:
                with noting:
                    return function(tangents)

            module = make_fx(noted)(tangents)
            if any(isinstance(tangent, CudaTensor) for tangent in tangents):
                for node in list(module.graph.nodes):
                    made = node.kwargs.get("device") == CPU or node.target is _OF_NUMBERS
                    if made and node not in noting.nodes:
                        with module.graph.inserting_after(node):
                            moved = module.graph.call_method("cuda")
                        node.replace_all_uses_with(moved)
                        moved.args = (node,)
                module.recompile()
            return module

        return trace

    return make


class _NodesOnCpu(TorchFunctionMode):
    """Notes the nodes that a trace gets from functions with results on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: set[torch.fx.Node] = set()

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        mode = proxy_tensor.get_proxy_mode()
        if mode is None:
            return function(*args, **(kwargs or {}))
        nodes = mode.tracer.graph.nodes
        before = len(nodes)
        result = function(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if tensors and not any(isinstance(tensor, CudaTensor) for tensor in tensors):
            self.nodes.update(islice(reversed(nodes), len(nodes) - before))
        return result
