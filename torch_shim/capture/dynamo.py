"""Configures Dynamo for handles: the device of a traced tensor, and what is not to be traced.

Dynamo traces with fake tensors. A fake tensor on a GPU makes C++ call the CUDA driver, which is
absent here, so handles are faked on the CPU and carry a mark; user code sees the device from the
mark.
"""

import functools
import logging
import sys
import time
import types
from collections.abc import Callable, Iterator
from functools import partial
from inspect import getattr_static
from types import FunctionType
from typing import Any, NoReturn

import torch
from torch._dynamo import convert_frame, symbolic_convert, utils
from torch._dynamo.eval_frame import skip_code
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.types import (  # type: ignore[attr-defined] # which has them from C++
    ConvertFrameReturn,
    FrameAction,
    FrameExecStrategy,
)
from torch._dynamo.variables import ConstantVariable, builder, torch_function
from torch._dynamo.variables.builtin import BuiltinVariable
from torch._dynamo.variables.functions import WrapperUserFunctionVariable
from torch._dynamo.variables.higher_order_ops import CheckpointHigherOrderVariable
from torch._dynamo.variables.misc import RandomVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch._dynamo.variables.torch import TorchCtxManagerClassVariable
from torch._dynamo.variables.torch_function import TensorWithTFOverrideVariable
from torch._functorch.autograd_function import AutogradFunctionApply
from torch._guards import Guard
from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from torch_shim.capture.encode import numpy_draws
from torch_shim.capture.local_run import ON_GPU, example_of, on_gpu, without_gpu
from torch_shim.capture.roots import pauses
from torch_shim.capture.traces import dynamo_settings
from torch_shim.capture.traces.background import ReadsChanged
from torch_shim.capture.traces.dynamo_settings import end_graph, traces
from torch_shim.capture.traces.snapshots import TraceReads
from torch_shim.cuda_api.cuda_module import hidden
from torch_shim.kernels import substitution
from torch_shim.patching import (
    CPU,
    CUDA,
    assigned,
    names_cuda,
    original_of,
    redirect,
    tracing_fakes,
)
from torch_shim.process_report import report
from torch_shim.tensors import attention_layers, foreign_classes, mixed_devices
from torch_shim.tensors.dispatch import names
from torch_shim.tensors.foreign_classes import cpu_class
from torch_shim.tensors.handles import PLAIN, CudaParameter, CudaTensor, NoTorchFunction
from torch_shim.tensors.moves import alias_of

_set_up: list[bool] = []
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # noqa: SLF001 - no public check

Native = Callable[..., Any]


def configure() -> None:
    """Patch Dynamo for this process; later calls do nothing."""
    if _set_up:
        return
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    # It prints the trace of an operator that refuses its inputs; the call raises that anyway.
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    redirect(builder, "wrap_to_fake_tensor_and_record", _fake_of)
    redirect(builder, "get_specialized_props", _properties_of)
    redirect(utils, "run_node", _run_node)
    redirect(convert_frame, "_compile", _compile)
    redirect(AutogradFunctionApply, "__call__", _apply_function)
    redirect(builder.VariableBuilder, "_wrap", _note_read)  # every object that a trace reads
    redirect(symbolic_convert.InstructionTranslatorBase, "step", _pause_before)
    redirect(Guard, "create", _pause_before)
    redirect(TensorVariable, "_method_register_hook", _leave_out_hooks)  # of both kinds
    redirect(RandomVariable, "call_method", _leave_out_samples)
    redirect(WrapperUserFunctionVariable, "call_function", _keep_cached_answers)
    redirect(CheckpointHigherOrderVariable, "_call_function", _leave_out_reentrant_checkpoints)
    redirect(TorchCtxManagerClassVariable, "call_function", _take_inference_mode_by_name)
    attention_layers.follow_in_traces()
    show_tensor_classes()
    dynamo_settings.install()
    dynamo_settings.leave_process_state()
    skip_own_frames()
    _set_up.append(True)


def skip_own_frames() -> None:
    """Exclude the shim's functions from tracing when they run between two graphs."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "torch_shim":
            pauses.step()
            for value in list(vars(module).values()):
                for code in _codes_of(value, name):
                    skip_code(code)


def _codes_of(value: Any, module: str) -> Iterator[types.CodeType]:
    if isinstance(value, types.CodeType):
        yield value
        for constant in value.co_consts:
            yield from _codes_of(constant, module)
    elif isinstance(value, (staticmethod, classmethod)):
        yield from _codes_of(value.__func__, module)
    elif isinstance(value, property):
        yield from _codes_of(value.fget, module)
        yield from _codes_of(value.fset, module)
    elif isinstance(value, types.FunctionType):
        yield from _codes_of(value.__code__, module)
        inner = original_of(value)
        if inner is not value and getattr(inner, "__globals__", {}).get("__name__") == module:
            yield from _codes_of(inner, module)
    elif isinstance(value, type) and value.__module__ == module:
        for member in list(vars(value).values()):
            if not isinstance(member, type):
                yield from _codes_of(member, module)


def _pause_before(native: Native, *args: Any, **kwargs: Any) -> Any:
    """Let the tracing thread pause before each call."""
    pauses.step()
    return native(*args, **kwargs)


def _fake_of(native: Native, value: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the fake tensor for an input; for a handle, the marked fake of a CPU alias."""
    if not isinstance(value, CudaTensor):
        return native(value, *args, **kwargs)
    kind = torch.nn.Parameter if isinstance(value, torch.nn.Parameter) else torch.Tensor
    with NoTorchFunction():
        alike = alias_of(kind, value, value.requires_grad)
    return _marked(native(alike, *args, **kwargs), is_gpu=True)


def _properties_of(native: Native, target: Any, tx: Any, example: Any, subclass: Any) -> Any:
    properties = native(target, tx, example, subclass)
    if on_gpu(example):
        properties["device"] = CUDA
    return properties


def _run_node(
    native: Native, tracer: Any, node: torch.fx.Node, args: Any, kwargs: Any, module: Any
) -> Any:
    pauses.step()
    _leave_out_mixed_devices(node, args, kwargs)
    _leave_out_random_numbers(tracer, node)
    is_gpu = _results_on_gpu(node, args, kwargs)
    if is_gpu:
        _leave_out_unknown_operators(tracer, node)
    if node.op == "call_method" and node.target in {"cuda", "cpu"}:
        return _marked(args[0], is_gpu=is_gpu, instead_of=args)
    args, kwargs = pytree.tree_map(_processor, (args, kwargs))
    if is_gpu:
        args, kwargs = substitution.arguments_of_node(node, args, kwargs)
    substitute = substitution.of_node(node, args, kwargs) if is_gpu else None
    result = substitute() if substitute else native(tracer, node, args, kwargs, module)
    return pytree.tree_map(lambda item: _marked(item, is_gpu=is_gpu, instead_of=args), result)


def _apply_function(native: Native, self: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
    """Mark the results of a custom autograd function, whose traced forward Dynamo runs again."""
    if not tracing_fakes():
        return native(self, forward, *args, **kwargs)
    results = native(self, without_gpu(forward), *args, **kwargs)
    returned, _saved = forward.graph.output_node().args[0]
    pairs = zip(pytree.tree_leaves(results), pytree.tree_leaves(returned), strict=True)
    for result, node in pairs:
        _marked(result, is_gpu=on_gpu(example_of(node)))
    return results


def _results_on_gpu(node: torch.fx.Node, args: Any, kwargs: Any) -> bool:
    if node.op == "call_method" and node.target in {"cuda", "cpu"}:
        return node.target == "cuda"
    named = [value for value in (kwargs.get("device"), *args) if _is_device(value)]
    if named:
        return names_cuda(named[0])
    if node.op == "call_method" and node.target in {"to", "type_as"} and len(args) > 1:
        other = args[1] if isinstance(args[1], torch.Tensor) else args[0]
        return on_gpu(other)
    first = args[0] if args else None
    if isinstance(first, torch.Tensor) and substitution.operator_of(node)[1] in mixed_devices.FIRST:
        return on_gpu(first)
    leaves, _ = pytree.tree_flatten((args, kwargs))
    return any(on_gpu(leaf) for leaf in leaves)


def _is_device(value: Any) -> bool:
    if isinstance(value, torch.device):
        return True
    return isinstance(value, str) and value.partition(":")[0] in {"cuda", "cpu"}


def _processor(value: Any) -> Any:
    if isinstance(value, torch.fx.GraphModule):  # a branch, or the body of a loop
        return without_gpu(value)
    return CPU if _is_device(value) and names_cuda(value) else value


def _marked(result: Any, *, is_gpu: bool, instead_of: Any = ()) -> Any:
    """Mark the result; it is cloned first if it is itself an input from the other device."""
    fake = isinstance(result, FakeTensor) or (
        isinstance(result, torch.Tensor) and _is_wrapped(result)
    )
    if not fake or on_gpu(result) == is_gpu:
        return result
    if any(result is value for value in instead_of):
        result = result.clone()
    setattr(result, ON_GPU, is_gpu)
    return result


def _note_read(native: Native, self: Any, value: Any) -> Any:
    if traces.reads is not None:
        traces.reads.note(value)
    return native(self, value)


def _compile(native: Native, *args: Any, **kwargs: Any) -> Any:
    """Compile with the accelerator hidden: while Dynamo traces, there is no stream to query.

    Nothing is compiled if what the trace has read has changed meanwhile.
    """
    start_s = time.perf_counter()
    reads = TraceReads()
    try:
        with assigned(hidden, accelerator=True), assigned(traces, reads=reads):
            result = native(*args, **kwargs)
    except Exception as error:
        # Dynamo fails in many ways over what is no longer as it was, the guards' own check is one.
        if traces.ours and reads.have_changed():
            return _given_up(error)
        if traces.ours and dynamo_settings.is_undecided(args[0], error):
            return _only_now(FrameAction.DEFAULT)
        raise
    finally:
        report.add(trace_s=time.perf_counter() - start_s)
    return _given_up() if traces.ours and reads.have_changed() else result


def _given_up(error: Exception | None = None) -> ConvertFrameReturn:
    """Return what lets this call run untraced; the thread that only traces gets an exception."""
    if traces.in_background:
        raise ReadsChanged from error
    return _only_now(FrameAction.SKIP)


def _only_now(what_it_calls: FrameAction) -> ConvertFrameReturn:
    strategy = FrameExecStrategy(FrameAction.SKIP, what_it_calls)
    return ConvertFrameReturn(frame_exec_strategy=strategy, apply_to_code=False)


# Where a graph ends although Dynamo could go on: an operator that runs better on handles.

_OF_STATE = names("getstate sample shuffle")  # of `random`, as Dynamo computes them in the trace
# Whose operators workers may know. One operator that they do not know keeps a whole graph out.
_KNOWN_LIBRARIES = names("aten prim prims torchvision transformers gpufaas")


def _leave_out_mixed_devices(node: torch.fx.Node, args: Any, kwargs: Any) -> None:
    """Break the graph where CUDA raises: the operator runs on handles, which raise that error."""
    operator, name = substitution.operator_of(node)
    if operator is None or isinstance(operator, HigherOrderOperator):
        return
    try:
        mixed_devices.refuse(name, tuple(args), kwargs, on_gpu)
    except RuntimeError as error:
        remedy = "Move inputs, parameters, and buffers to the same device."
        end_graph("Tensors on two devices", name, str(error), remedy, from_exc=error)


def _leave_out_unknown_operators(tracer: Any, node: torch.fx.Node) -> None:
    """Break the graph at an operator that a program registered: it runs in the function.

    Not inside of a loop's body, which must be one graph, nor where the user wants one graph.
    """
    target = node.target.overloadpacket if isinstance(node.target, OpOverload) else node.target
    name = str(target._qualified_op_name) if isinstance(target, OpOverloadPacket) else ""  # noqa: SLF001 - its one full name
    if name.partition("::")[0] not in {"", *_KNOWN_LIBRARIES} and _may_break(tracer):
        why = f"No worker has the operator {name}."
        end_graph("Custom operator", name, why, "Write it with PyTorch's operators.")


def _leave_out_random_numbers(tracer: Any, node: torch.fx.Node) -> None:
    """Break the graph where NumPy draws: in a graph the numbers would not be those of its seed."""
    made_by_numpy = isinstance(node.target, utils.numpy_to_tensor_wrapper)
    if made_by_numpy and numpy_draws(node.target) and _may_break(tracer):
        _break_for_random_numbers(str(node.target))


def _leave_out_samples(
    native: Native, self: Any, tx: Any, name: str, *args: Any, **kwargs: Any
) -> Any:
    """Break graphs where `random` samples or shuffles: a graph would repeat the trace's choice."""
    seeded = self.source is None or tx.output.side_effects.is_modified(self)
    if name in _OF_STATE and not seeded and _may_break(tx.output):
        _break_for_random_numbers(f"random.{name}")
    return native(self, tx, name, *args, **kwargs)


def _keep_cached_answers(
    native: Native, self: Any, tx: Any, args: list[Any], kwargs: dict[str, Any]
) -> Any:
    """Let functions under `functools.cache` answer from it: Dynamo looks behind the cache.

    A plain answer to plain arguments stands in the graph as it is. For every other the graph ends:
    the function may draw numbers or count its calls, and its caller gets the same object each time.
    """
    if not _has_cache(self.wrapper_obj) or not traces.ours:
        return native(self, tx, args, kwargs)
    if self.source is not None:  # by itself Dynamo takes any other cached function for it
        install_guard(self.source.make_guard(GuardBuilder.ID_MATCH))
    answer = _cached_answer(self.wrapper_obj, args, kwargs)
    if answer is not None:
        return answer
    if _may_break(tx.output):
        why = "It answers from its cache, which a graph does not have."
        end_graph("Cached function", str(self.wrapper_obj), why, "Call it outside of forward.")
    return native(self, tx, args, kwargs)


def _leave_out_reentrant_checkpoints(
    native: Native, self: Any, tx: Any, args: Any, kwargs: dict[str, Any]
) -> Any:
    """Break graphs at checkpoints of the older kind while gradients are recorded.

    These give their parameters none, unless an input has some, which no graph knows of.
    """
    chosen = kwargs.get("use_reentrant")
    newer = chosen is not None and chosen.as_python_constant() is False
    if torch.is_grad_enabled() and not newer and _may_break(tx.output):
        why = "It computes gradients, which is in the function."
        end_graph("Reentrant checkpoint", str(args[0]), why, "Pass use_reentrant=False.")
    return native(self, tx, args, kwargs)


def _take_inference_mode_by_name(
    native: Native, self: Any, tx: Any, args: Any, kwargs: dict[str, Any]
) -> Any:
    """Let `torch.inference_mode(mode=...)` stand in graphs, of which Dynamo takes no keyword."""
    if self.value is torch.inference_mode and [*kwargs] == ["mode"]:
        args, kwargs = [*args, kwargs["mode"]], {}
    return native(self, tx, args, kwargs)


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
    why = f"{what} draws from a generator which no graph has."
    remedy = "Draw them outside of forward, or by PyTorch's functions."
    end_graph("Random numbers", what, why, remedy)


def _leave_out_hooks(native: Native, self: TensorVariable, tx: Any, name: str, hook: Any) -> Any:
    """Break graphs where a hook is registered on a tensor that they compute.

    Dynamo makes a graph of the hook, without what it notes elsewhere; and a forward pass of a
    worker leaves no tensor to register it on. Between two graphs it is registered as it is.
    """
    if not self.source and _may_break(tx.output):
        why = "The hook runs when gradients are computed, which is in the function."
        end_graph("Hook on a computed tensor", name, why, "Register it outside of forward.")
    return native(self, tx, name, hook)


def _may_break(tracer: Any) -> bool:
    """Whether this trace is the shim's, may have several graphs, and is in none's branch or loop.

    A checkpoint's region may break: the whole checkpoint then runs as it does without graphs.
    """
    users_whole = tracer.root_tx.one_graph and not traces.in_background
    part = tracer.current_tracer
    while part.parent is not None and part.source_target is tag_activation_checkpoint:
        part = part.parent
    return traces.ours and part.parent is None and not users_whole


# Shows Dynamo a program's tensor classes, which have handle classes in the program's process.
#
# Dynamo follows such a class as torch does: its `__torch_function__`, methods and properties stand
# in the trace, and outputs become of the class after the graph has run.

_OF_TORCH = frozenset({CudaTensor, CudaParameter})
_OF_HANDLES = names("device is_cuda is_cpu")  # which no program's class answers
# What a class may have of its own beside operators such as `__add__`, which Dynamo ignores.
_NO_OPERATORS = names(
    "__annotations__ __deepcopy__ __dict__ __dir__ __doc__ __firstlineno__ __format__ __init__ "
    "__init_subclass__ __module__ __new__ __reduce__ __reduce_ex__ __repr__ __setstate__ __slots__ "
    "__static_attributes__ __str__ __torch_function__ __weakref__"
)


def show_tensor_classes() -> None:
    """Let `type(x)` and `x.__class__` be the program's class in traces, and `x.device` the GPU."""
    redirect(builder, "infer_subclass_type", _class_to_dynamo)
    redirect(utils, "to_subclass", _to_subclass)
    redirect(torch_function, "call_torch_function", _call_function_of_class)
    redirect(BuiltinVariable, "call_type", _call_type)
    redirect(builder.VariableBuilder, "wrap_tensor", _wrap_tensor)
    kind = TensorWithTFOverrideVariable
    name = "tp_getattro_impl" if hasattr(kind, "tp_getattro_impl") else "var_getattr"
    redirect(kind, name, partial(_read, getattr(TensorVariable, name)))


def _class_to_dynamo(native: Native, value: Any) -> Any:
    """Return the class that Dynamo follows; None for a plain tensor."""
    if not isinstance(value, CudaTensor):
        return native(value)
    kind = cpu_class(type(value))
    if has_operators(value):
        why = f"Dynamo does not call the operators of {kind.__qualname__}."
        remedy = "Define __torch_function__ instead of operators such as __add__."
        end_graph("Tensor class with operators of its own", kind.__qualname__, why, remedy)
    return None if kind in PLAIN else kind


def _to_subclass(native: Native, value: Any, kind: type) -> Any:
    """Give an output its class, unless it is an input of this class that the graph wrote to."""
    return value if cpu_class(type(value)) is kind else native(value, kind)


def _call_function_of_class(native: Native, *args: Any, **options: Any) -> Any:
    """Trace a class's `__torch_function__`, in which operators ask the class again, as in C++."""
    if traces.ours:
        options.pop("is_subclass_dispatch", None)  # Dynamo's word for asking no class inside of it
    return native(*args, **options)


def has_operators(value: Any) -> bool:
    """Whether this is a GPU tensor of a class that Dynamo cannot follow, for its operators."""
    if not isinstance(value, CudaTensor) or type(value) in _OF_TORCH:
        return False
    kind = cpu_class(type(value))
    if kind is type(value):  # derived from the class of plain GPU tensors
        return True
    own = kind.__mro__[: kind.__mro__.index(torch.Tensor)]
    defined = {name for base in own if base is not torch.nn.Parameter for name in vars(base)}
    special = {name for name in defined if name[:2] == "__" and hasattr(torch.Tensor, name)}
    return bool(special - _NO_OPERATORS) or "__getattr__" in defined


def _call_type(native: Native, self: Any, tx: Any, variable: Any) -> Any:
    if isinstance(variable, TensorWithTFOverrideVariable):
        return variable.class_type_var(tx)
    return native(self, tx, variable)


def _wrap_tensor(native: Native, self: Any, value: Any) -> Any:
    """Let no class see what Dynamo reads of its tensors: what the class notes may be guarded."""
    if not (traces.ours and foreign_classes.is_asked(cpu_class(type(value)))):
        return native(self, value)
    with NoTorchFunction():
        return native(self, value)


def _read(of_plain: Native, native: Native, self: Any, tx: Any, name: str) -> Any:
    if name == "__class__":
        return self.class_type_var(tx)
    of_handles = name in _OF_HANDLES and self.device == CUDA
    if of_handles or _is_torch_s_function(self.class_type, name):
        return of_plain(self, tx, name)
    return native(self, tx, name)


def _is_torch_s_function(kind: type, name: str) -> bool:
    """Whether a method is in Python, which Dynamo takes for a property of such a class."""
    method = getattr_static(torch.Tensor, name, None)
    return isinstance(method, FunctionType) and getattr_static(kind, name) is method
