"""Where a graph ends although Dynamo could go on: an operator that runs better on handles."""

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch._dynamo import utils
from torch._dynamo.exc import unimplemented
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.variables import ConstantVariable
from torch._dynamo.variables.functions import WrapperUserFunctionVariable
from torch._dynamo.variables.higher_order_ops import CheckpointHigherOrderVariable
from torch._dynamo.variables.misc import RandomVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch._dynamo.variables.torch import TorchCtxManagerClassVariable
from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

from torch_shim.capture.traces import dynamo_settings
from torch_shim.encoding import numpy_calls
from torch_shim.missing_kernels import substitution
from torch_shim.mixed_devices import rules
from torch_shim.tensors.dispatch import names

_OF_STATE = names("getstate sample shuffle")  # of `random`, as Dynamo computes them in the trace
# Whose operators workers may know. One operator that they do not know keeps a whole graph out.
_KNOWN_LIBRARIES = names("aten prim prims torchvision transformers gpufaas")


def refuse_mixed_devices(
    node: torch.fx.Node, args: Any, kwargs: Any, on_gpu: Callable[[Any], bool]
) -> None:
    """Break the graph where CUDA raises: the operator runs on handles, which raise that error."""
    operator, name = substitution.operator_of(node)
    if operator is None or isinstance(operator, HigherOrderOperator):
        return
    try:
        rules.refuse(name, tuple(args), kwargs, on_gpu)
    except RuntimeError as error:
        unimplemented(
            gb_type="Tensors on two devices",
            context=name,
            explanation=str(error),
            hints=["Move inputs, parameters, and buffers to the same device."],
            from_exc=error,
        )


def leave_out_unknown_operators(tracer: Any, node: torch.fx.Node) -> None:
    """Break the graph at an operator that a program registered: it runs in the function.

    Not inside of a loop's body, which must be one graph, nor where the user wants one graph.
    """
    name = _registered_name(node.target)
    if name.partition("::")[0] not in {"", *_KNOWN_LIBRARIES} and _may_break(tracer):
        unimplemented(
            gb_type="Custom operator",
            context=name,
            explanation=f"No worker has the operator {name}.",
            hints=["Write it with PyTorch's operators."],
        )


def leave_out_random_numbers(tracer: Any, node: torch.fx.Node) -> None:
    """Break the graph where NumPy draws: in a graph the numbers would not be those of its seed."""
    made_by_numpy = isinstance(node.target, utils.numpy_to_tensor_wrapper)
    if made_by_numpy and numpy_calls.draws(node.target) and _may_break(tracer):
        _break_for_random_numbers(str(node.target))


def leave_out_samples() -> None:
    """Break graphs where `random` samples or shuffles: a graph would repeat the trace's choice."""
    native = RandomVariable.call_method

    @functools.wraps(native)
    def call_method(self: Any, tx: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        seeded = self.source is None or tx.output.side_effects.is_modified(self)
        if name in _OF_STATE and not seeded and _may_break(tx.output):
            _break_for_random_numbers(f"random.{name}")
        return native(self, tx, name, *args, **kwargs)

    RandomVariable.call_method = call_method  # type: ignore[method-assign]


def keep_cached_answers() -> None:
    """Let functions under `functools.cache` answer from it: Dynamo looks behind the cache.

    A plain answer to plain arguments stands in the graph as it is. For every other the graph ends:
    the function may draw numbers or count its calls, and its caller gets the same object each time.
    """
    native = WrapperUserFunctionVariable.call_function

    @functools.wraps(native)
    def call_function(self: Any, tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if not _has_cache(self.wrapper_obj) or not dynamo_settings.traces_for_gpu():
            return native(self, tx, args, kwargs)
        if self.source is not None:  # by itself Dynamo takes any other cached function for it
            install_guard(self.source.make_guard(GuardBuilder.ID_MATCH))
        answer = _cached_answer(self.wrapper_obj, args, kwargs)
        if answer is not None:
            return answer
        if _may_break(tx.output):
            unimplemented(
                gb_type="Cached function",
                context=str(self.wrapper_obj),
                explanation="It answers from its cache, which a graph does not have.",
                hints=["Call it outside of forward."],
            )
        return native(self, tx, args, kwargs)

    WrapperUserFunctionVariable.call_function = call_function  # type: ignore[method-assign]


def leave_out_reentrant_checkpoints() -> None:
    """Break graphs at checkpoints of the older kind while gradients are recorded.

    These give their parameters none, unless an input has some, which no graph knows of.
    """
    native = CheckpointHigherOrderVariable._call_function  # noqa: SLF001 - no public hook

    @functools.wraps(native)
    def call_function(self: Any, tx: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        chosen = kwargs.get("use_reentrant")
        newer = chosen is not None and chosen.as_python_constant() is False
        if torch.is_grad_enabled() and not newer and _may_break(tx.output):
            unimplemented(
                gb_type="Reentrant checkpoint",
                context=str(args[0]),
                explanation="It computes gradients, which is in the function.",
                hints=["Pass use_reentrant=False."],
            )
        return native(self, tx, args, kwargs)

    CheckpointHigherOrderVariable._call_function = call_function  # type: ignore[method-assign] # noqa: SLF001 - see above


def take_inference_mode_by_name() -> None:
    """Let `torch.inference_mode(mode=...)` stand in graphs, of which Dynamo takes no keyword."""
    native = TorchCtxManagerClassVariable.call_function

    @functools.wraps(native)
    def call_function(self: Any, tx: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if self.value is torch.inference_mode and [*kwargs] == ["mode"]:
            args, kwargs = [*args, kwargs["mode"]], {}
        return native(self, tx, args, kwargs)

    TorchCtxManagerClassVariable.call_function = call_function  # type: ignore[method-assign]


def _has_cache(function: Any) -> bool:
    """Whether it is `functools.cache`'s or its like, and none of torch's own."""
    made_by = str(getattr(function, "__module__", "") or "").partition(".")[0]
    return isinstance(function, functools._lru_cache_wrapper) and made_by != "torch"  # noqa: SLF001 - its one type


def _cached_answer(function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Return the answer as Dynamo has constants; None if it, or an argument, is no such thing."""
    if not all(value.is_python_constant() for value in (*args, *kwargs.values())):
        return None
    try:
        answer = function(
            *(value.as_python_constant() for value in args),
            **{name: value.as_python_constant() for name, value in kwargs.items()},
        )
    except Exception:  # noqa: BLE001 - whatever it raises, it raises again where the graph ends
        return None
    return ConstantVariable.create(answer) if ConstantVariable.is_literal(answer) else None


def _break_for_random_numbers(what: str) -> NoReturn:
    unimplemented(
        gb_type="Random numbers",
        context=what,
        explanation=f"{what} draws from a generator which no graph has.",
        hints=["Draw them outside of forward, or by PyTorch's functions."],
    )


def leave_out_hooks() -> None:
    """Break graphs where a hook is registered on a tensor that they compute.

    Dynamo makes a graph of the hook, without what it notes elsewhere; and a forward pass of a
    worker leaves no tensor to register it on. Between two graphs it is registered as it is.
    """
    native = TensorVariable._method_register_hook  # noqa: SLF001 - where both kinds of hooks arrive

    @functools.wraps(native)
    def register(self: TensorVariable, tx: Any, name: str, hook: Any) -> Any:
        if not self.source and _may_break(tx.output):
            unimplemented(
                gb_type="Hook on a computed tensor",
                context=name,
                explanation="The hook runs when gradients are computed, which is in the function.",
                hints=["Register it outside of forward."],
            )
        return native(self, tx, name, hook)

    TensorVariable._method_register_hook = register  # type: ignore[method-assign] # noqa: SLF001 - see above


def _may_break(tracer: Any) -> bool:
    """Whether this trace is the shim's, may have several graphs, and is in none's branch or loop.

    A checkpoint's region may break: the whole checkpoint then runs as it does without graphs.
    """
    users_whole = tracer.root_tx.one_graph and not dynamo_settings.traces_in_background()
    part = tracer.current_tracer
    while part.parent is not None and part.source_target is tag_activation_checkpoint:
        part = part.parent
    return dynamo_settings.traces_for_gpu() and part.parent is None and not users_whole


def _registered_name(target: Any) -> str:
    if isinstance(target, OpOverload):
        target = target.overloadpacket
    return str(target._qualified_op_name) if isinstance(target, OpOverloadPacket) else ""  # noqa: SLF001 - its one full name
