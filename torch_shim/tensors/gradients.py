"""Gradients: what C++ passes to hooks, custom functions and transforms becomes handles.

The autograd engine creates gradients and unpacks saved tensors as plain tensors. When such a tensor
reaches Python, it gets the class of the tensor that it belongs to.
"""

import inspect
from collections.abc import Callable, Sequence
from itertools import islice
from types import FunctionType
from typing import Any

import torch
from torch._functorch import autograd_function, eager_transforms, vmap
from torch.autograd import function as functions
from torch.fx.experimental import proxy_tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from torch_shim.patching import CPU, redirect, set_attribute
from torch_shim.tensors.absent_bytes import bring
from torch_shim.tensors.dispatch import Operator, handles, names
from torch_shim.tensors.handles import (
    PLAIN,
    CudaParameter,
    CudaTensor,
    NoTorchFunction,
    Tensor,
    become_cuda,
    like_handles,
    refuse_mixed_devices,
    wrap,
)

_SAVED = "_gpufaas_saved"  # which of the saved tensors are on the GPU
_RESULTS = "_gpufaas_results"  # which of the results are on the GPU

_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # noqa: SLF001 - no public check
_native_saved: Any = torch._C._FunctionBase.saved_tensors  # noqa: SLF001 - its only location
_native_register_hook: Any = Tensor.register_hook


def install() -> None:
    set_attribute(CudaTensor, "backward", _backward)
    set_attribute(CudaTensor, "register_hook", _register_hook)
    context = functions.FunctionCtx
    redirect(context, "save_for_backward", _save_for_backward)
    backward = functions.BackwardCFunction
    set_attribute(backward, "saved_tensors", property(_saved_tensors))
    redirect(backward, "apply", _apply_backward)
    native = inspect.getattr_static(torch.autograd.Function, "apply")
    set_attribute(torch.autograd.Function, "apply", classmethod(_apply_forward(native)))
    redirect(torch.autograd.graph.saved_tensors_hooks, "__init__", _pack_with_handles)
    hook = torch.utils.hooks.BackwardHook
    redirect(hook, "setup_input_hook", _watch_inputs)
    redirect(hook, "_set_user_hook", _class_user_hooks)
    _install_transforms()


def _backward(
    self: Tensor,
    gradient: Tensor | None = None,
    retain_graph: bool | None = None,  # noqa: FBT001 - PyTorch's signature
    create_graph: bool = False,  # noqa: FBT001, FBT002 - see above
    inputs: Sequence[Tensor] | None = None,
) -> None:
    _backward_of_all(self, gradient, retain_graph, create_graph, inputs=inputs)


def _make_gradients(outputs: Sequence[Any], gradients: Sequence[Any], **options: bool) -> Any:
    """Make gradients as torch does, but refuse, as CUDA does, one on another device."""
    for pair in zip(outputs, gradients, strict=False):
        refuse_mixed_devices(torch.autograd.backward, pair, {})
    return torch.autograd._make_grads(outputs, gradients, **options)  # noqa: SLF001 - what torch calls


def _without_protocol(function: Any) -> Any:
    """Return a copy of the function that bypasses the torch function protocol.

    The protocol would disable handles for every hook that runs inside the function.
    """
    replaced = {"has_torch_function": lambda _: False, "_make_grads": _make_gradients}
    namespace = {**function.__globals__, **replaced}
    copied = FunctionType(function.__code__, namespace, argdefs=function.__defaults__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


_grad = _without_protocol(torch.autograd.grad)
_backward_of_all = _without_protocol(torch.autograd.backward)


@handles(torch.autograd.backward)
def _backpropagate(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    del func
    _backward_of_all(*args, **kwargs)


@handles(torch.autograd.grad)
def _differentiate(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute gradients; each gradient is on the device of its input."""
    del func
    gradients = _grad(*args, **kwargs)
    inputs = kwargs["inputs"] if "inputs" in kwargs else args[1]
    inputs = (inputs,) if isinstance(inputs, Tensor) else inputs
    return tuple(map(_like, gradients, inputs))


def _like(gradient: Tensor | None, source: Any) -> Tensor | None:
    if gradient is None or not isinstance(source, Tensor):
        return gradient
    if isinstance(source, CudaTensor):
        return become_cuda(gradient)
    return gradient.cpu()


def _register_hook(self: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Any:
    called = _enabling(hook)

    def on_gpu(gradient: Tensor) -> Any:
        return called(like_handles(wrap(gradient)))

    with NoTorchFunction():
        return _native_register_hook(self, on_gpu)


def _save_for_backward(native: Callable[..., None], self: Any, *tensors: Tensor | None) -> None:
    native(self, *tensors)
    flags = tuple(isinstance(tensor, CudaTensor) for tensor in tensors)
    if any(flags):
        setattr(self, _SAVED, flags)


def _saved_tensors(self: Any) -> tuple[Tensor | None, ...]:
    tensors: tuple[Tensor | None, ...] = _native_saved.__get__(self)
    _class_flagged(tensors, getattr(self, _SAVED, ()))
    return tensors


def _apply_backward(native: Callable[..., Any], self: Any, *gradients: Any) -> Any:
    flags = getattr(self, _RESULTS, None)
    if flags is None:
        return native(self, *gradients)
    _class_flagged(gradients, flags)
    return _enabling(native)(self, *gradients)


def _enabling(function: Callable[..., Any]) -> Callable[..., Any]:
    """Enable handles for a function that autograd calls from inside of an operator.

    The operator is the one whose tensors are packed, or `backward` of another class of tensors.
    """

    def enabled(*args: Any) -> Any:
        with torch._C._EnableTorchFunction():  # noqa: SLF001 - no public way
            return function(*args)

    return enabled


def _class_flagged(tensors: Sequence[Any], flags: Sequence[bool]) -> None:
    for tensor, flag in zip(tensors, flags, strict=False):
        if flag and type(tensor) in PLAIN:
            become_cuda(tensor)


def _apply_forward(native: Any) -> Callable[..., Any]:
    """Wrap `Function.apply`; `native` is a class method of Python or C, bound at each call."""

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        result = native.__get__(None, cls)(*args, **kwargs)
        if torch.compiler.is_dynamo_compiling():
            return result
        results = result if isinstance(result, tuple) else (result,)
        if any(isinstance(value, CudaTensor) for value in (*args, *results)):
            _class_results(args, results)
        return result

    return apply


def _class_results(args: tuple[Any, ...], results: tuple[Any, ...]) -> None:
    """Make results that share an input's memory handles: autograd returns them as new objects."""
    on_gpu = {_address(value) for value in args if isinstance(value, CudaTensor)} - {None}
    for value in results:
        if type(value) in PLAIN and _address(value) in on_gpu:
            become_cuda(value)
    flags = tuple(isinstance(value, CudaTensor) for value in results)
    for value in results:
        node: Any = getattr(value, "grad_fn", None)
        if isinstance(node, functions.BackwardCFunction):
            setattr(node, _RESULTS, flags)


def _address(tensor: Any) -> int | None:
    """Return the address of a tensor's data; None for a tensor without storage."""
    with NoTorchFunction():
        if tensor.layout is not torch.strided or _is_wrapped(tensor):
            return None
        return tensor.data_ptr() or None


def _pack_with_handles(
    native: Callable[..., None], self: Any, pack_hook: Callable[[Tensor], Any], unpack_hook: Any
) -> None:
    native(self, _enabling(pack_hook), _enabling(unpack_hook))


def _watch_inputs(native: Callable[..., Any], self: Any, args: Any) -> Any:
    self.on_gpu = any(isinstance(value, CudaTensor) for value in args)
    return native(self, args)


def _class_user_hooks(native: Callable[..., None], self: Any, node: Any) -> None:
    """Pass handles to module hooks if the inputs or outputs of the module are on the GPU."""

    def on_gpu(hook: Callable[..., Any]) -> Callable[..., Any]:
        return lambda module, *gradients: hook(module, *wrap(gradients))

    if self.on_gpu:
        self.user_hooks = [on_gpu(hook) for hook in self.user_hooks]
        self.user_pre_hooks = [on_gpu(hook) for hook in self.user_pre_hooks]
    native(self, node)


# torch.func: tensors that a transform passes to the user's function keep their device.

_ONE_TENSOR = names(
    "_add_batch_dim _remove_batch_dim _wrap_for_grad _unwrap_for_grad _wrap_functional_tensor "
    "_unwrap_functional_tensor get_unwrapped"
)
_OF_NUMBERS = torch.ops.aten.lift_fresh_copy.default  # what `torch.tensor` leaves in a trace


def _install_transforms() -> None:
    """Make the functions that wrap and unwrap tensors for a transform preserve the class."""
    for module in (vmap, eager_transforms, autograd_function):
        for name in _ONE_TENSOR:
            redirect(module, name, _with_bytes)
    redirect(torch.autograd.forward_ad, "make_dual", _keeping_class)
    redirect(torch.autograd.forward_ad, "unpack_dual", _keeping_class)
    # Tensors that a trace by make_fx, as in `linearize`, meets and was not given: constants.
    constants = (*proxy_tensor.HANDLED_TYPES, CudaTensor, CudaParameter)
    set_attribute(proxy_tensor, "HANDLED_TYPES", constants)
    redirect(eager_transforms, "lazy_dynamo_disallow", _linearize_on_gpu)


def _with_bytes(native: Callable[..., Any], tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """Fetch a tensor's bytes first: operators on wrapped tensors do not show that they read it."""
    if not torch.compiler.is_dynamo_compiling():
        bring((tensor,))
    return _keeping_class(native, tensor, *args, **kwargs)


def _keeping_class(native: Callable[..., Any], tensor: Any, *args: Any, **kwargs: Any) -> Any:
    result = native(tensor, *args, **kwargs)
    if isinstance(tensor, CudaTensor):
        for value in result if isinstance(result, tuple) else (result,):
            if isinstance(value, Tensor):
                become_cuda(value)
    return result


def _linearize_on_gpu(native: Callable[..., Any], function: Any) -> Any:
    """Wrap what `linearize` traces by: what a derivative makes is where its tensors are."""
    disallowed = native(function)
    return _traced_on_gpu(disallowed) if function is proxy_tensor.make_fx else disallowed


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
