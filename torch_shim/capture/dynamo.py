"""Configures Dynamo for handles: the device of a traced tensor, and the code not to be traced.

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
from typing import Any

import torch
from torch._dynamo import convert_frame, symbolic_convert, utils
from torch._dynamo.eval_frame import skip_code
from torch._dynamo.types import (  # type: ignore[attr-defined] # which has them from C++
    ConvertFrameReturn,
    FrameAction,
    FrameExecStrategy,
)
from torch._dynamo.variables import builder, torch_function
from torch._functorch.autograd_function import AutogradFunctionApply
from torch._guards import Guard
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from torch_shim.capture import graph_limits
from torch_shim.capture.background import ReadsChanged
from torch_shim.capture.local_run import without_gpu
from torch_shim.capture.traces import (
    dynamo_settings,
    failed_traces,
    process_state,
    tensor_classes,
    trace_reads,
)
from torch_shim.capture.traces.pauses import pauses
from torch_shim.cuda_api.tracing_state import tracing
from torch_shim.layers import fast_paths
from torch_shim.missing_kernels import substitution
from torch_shim.mixed_devices import rules
from torch_shim.patching import original_of, replace
from torch_shim.process_report import report
from torch_shim.redirected_device import CPU, CUDA, names_cuda, tracing_fakes
from torch_shim.tensors.handles import CudaTensor, NoTorchFunction
from torch_shim.tensors.modules import alias_of

_MARK = "_gpufaas_on_gpu"
_set_up: list[bool] = []
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # noqa: SLF001 - no public check

Native = Callable[..., Any]


def configure() -> None:
    """Configure Dynamo, once per process."""
    if _set_up:
        return
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    # It prints the trace of an operator that refuses its inputs; the call raises that anyway.
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    _put_around(builder, "infer_subclass_type", tensor_classes.class_to_dynamo)
    _put_around(utils, "to_subclass", tensor_classes.to_subclass)
    _put_around(torch_function, "call_torch_function", tensor_classes.call_function_of_class)
    _put_around(builder, "wrap_to_fake_tensor_and_record", _fake_of)
    _put_around(builder, "get_specialized_props", _properties_of)
    _put_around(utils, "run_node", _run_node)
    _put_around(convert_frame, "_compile", _compile)
    replace(AutogradFunctionApply, "__call__", _function_applied)
    builder.VariableBuilder._wrap = _noting(builder.VariableBuilder._wrap)  # type: ignore[method-assign] # noqa: SLF001 - where every object that a trace reads passes
    _put_steps(symbolic_convert.InstructionTranslatorBase, "step")
    _put_steps(Guard, "create")
    fast_paths.follow_in_traces()
    tensor_classes.install()
    graph_limits.leave_out_hooks()
    graph_limits.leave_out_samples()
    graph_limits.keep_cached_answers()
    graph_limits.leave_out_reentrant_checkpoints()
    graph_limits.take_inference_mode_by_name()
    dynamo_settings.install()
    process_state.install()
    skip_own_frames()
    _set_up.append(True)


def on_gpu(example: Any) -> bool:
    """Whether a traced tensor represents a tensor on the GPU."""
    return isinstance(example, torch.Tensor) and getattr(example, _MARK, False)


def skip_own_frames() -> None:
    """Exclude the shim's functions from tracing when they run between two graphs."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "torch_shim":
            pauses.step()
            for value in list(vars(module).values()):
                for code in _codes_of(value, name):
                    skip_code(code)


def _codes_of(value: Any, module: str) -> Iterator[types.CodeType]:
    """Yield the code objects of a function or of a class's methods, nested ones included."""
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


def _put_around(module: types.ModuleType, name: str, around: Native) -> None:
    """Wrap a function of Dynamo's; the wrapper gets the native function as its first argument."""
    setattr(module, name, functools.partial(around, getattr(module, name)))


def _put_steps(owner: type, name: str) -> None:
    """Let the tracing thread pause before each call of a method."""
    native = getattr(owner, name)

    @functools.wraps(native)
    def with_pauses(self: Any, *args: Any, **kwargs: Any) -> Any:
        pauses.step()
        return native(self, *args, **kwargs)

    setattr(owner, name, with_pauses)


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
    """Trace one operator over CPU fakes, and mark its results with the device they would be on."""
    pauses.step()
    graph_limits.refuse_mixed_devices(node, args, kwargs, on_gpu)
    graph_limits.leave_out_random_numbers(tracer, node)
    is_gpu = _results_on_gpu(node, args, kwargs)
    if is_gpu:
        graph_limits.leave_out_unknown_operators(tracer, node)
    if node.op == "call_method" and node.target in {"cuda", "cpu"}:
        return _marked(args[0], is_gpu=is_gpu, instead_of=args)
    args, kwargs = pytree.tree_map(_processor, (args, kwargs))
    if is_gpu:
        args, kwargs = substitution.arguments_of_node(node, args, kwargs)
    substitute = substitution.of_node(node, args, kwargs) if is_gpu else None
    result = substitute() if substitute else native(tracer, node, args, kwargs, module)
    return pytree.tree_map(lambda item: _marked(item, is_gpu=is_gpu, instead_of=args), result)


def _function_applied(native: Native) -> Native:
    """Mark the results of a custom autograd function, whose traced forward Dynamo runs again."""

    def call(self: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
        if not tracing_fakes():
            return native(self, forward, *args, **kwargs)
        results = native(self, without_gpu(forward), *args, **kwargs)
        (output,) = (node for node in forward.graph.nodes if node.op == "output")
        returned, _saved = output.args[0]
        pairs = zip(pytree.tree_leaves(results), pytree.tree_leaves(returned), strict=True)
        for result, node in pairs:
            traced = node.meta.get("example_value") if isinstance(node, torch.fx.Node) else None
            _marked(result, is_gpu=on_gpu(traced))
        return results

    return call


def _results_on_gpu(node: torch.fx.Node, args: Any, kwargs: Any) -> bool:
    """Whether an operator's results are on the GPU, by the device it names or by its inputs."""
    if node.op == "call_method" and node.target in {"cuda", "cpu"}:
        return node.target == "cuda"
    named = [value for value in (kwargs.get("device"), *args) if _is_device(value)]
    if named:
        return names_cuda(named[0])
    if node.op == "call_method" and node.target in {"to", "type_as"} and len(args) > 1:
        other = args[1] if isinstance(args[1], torch.Tensor) else args[0]
        return on_gpu(other)
    first = args[0] if args else None
    if isinstance(first, torch.Tensor) and substitution.operator_of(node)[1] in rules.FIRST:
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
    setattr(result, _MARK, is_gpu)
    return result


def _noting(native: Native) -> Native:
    def wrap(self: Any, value: Any) -> Any:
        trace_reads.note(value)
        return native(self, value)

    return wrap


def _compile(native: Native, *args: Any, **kwargs: Any) -> Any:
    """Compile with the accelerator hidden: while Dynamo traces, there is no stream to query.

    Nothing is compiled if what the trace has read has changed meanwhile.
    """
    start_s = time.perf_counter()
    reads = trace_reads.TraceReads()
    try:
        with tracing(), trace_reads.noted_in(reads):
            result = native(*args, **kwargs)
    except Exception as error:
        # Dynamo fails in many ways over what is no longer as it was, the guards' own check is one.
        if dynamo_settings.traces_for_gpu() and reads.have_changed():
            return _given_up(error)
        if dynamo_settings.traces_for_gpu() and failed_traces.is_undecided(args[0], error):
            return _only_now(FrameAction.DEFAULT)
        raise
    finally:
        report.add("trace_s", time.perf_counter() - start_s)
    return _given_up() if dynamo_settings.traces_for_gpu() and reads.have_changed() else result


def _given_up(error: Exception | None = None) -> ConvertFrameReturn:
    """Return what lets this call run untraced; the thread that only traces gets an exception."""
    if dynamo_settings.traces_in_background():
        raise ReadsChanged from error
    return _only_now(FrameAction.SKIP)


def _only_now(what_it_calls: FrameAction) -> ConvertFrameReturn:
    """Return what lets a frame run untraced this time."""
    strategy = FrameExecStrategy(FrameAction.SKIP, what_it_calls)
    return ConvertFrameReturn(frame_exec_strategy=strategy, apply_to_code=False)
