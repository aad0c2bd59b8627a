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
from torch._dynamo import config, convert_frame, utils
from torch._dynamo.eval_frame import skip_code
from torch._dynamo.variables import builder
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from torch_shim.cuda_api.tracing_state import tracing
from torch_shim.process_report import report
from torch_shim.redirected_device import CPU, CUDA, names_cuda
from torch_shim.tensors.handles import CudaTensor, NoTorchFunction

# A module may be called in many ways: at torch's limit of 8 it would run locally from then on.
RECOMPILE_LIMIT = 64
ALL_RECOMPILES_LIMIT = 4096

_MARK = "_gpufaas_on_gpu"
_set_up: list[bool] = []

Native = Callable[..., Any]


def configure() -> None:
    """Configure Dynamo, once per process."""
    if _set_up:
        return
    _set_up.append(True)
    config.skip_nnmodule_hook_guards = False  # an added hook must be noticed
    config.allow_rnn = True
    config.suppress_errors = True  # code that cannot be traced runs eagerly and raises its errors
    config.recompile_limit = RECOMPILE_LIMIT
    config.accumulated_recompile_limit = ALL_RECOMPILES_LIMIT
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    _put_around(builder, "infer_subclass_type", _plain_to_dynamo)
    _put_around(builder, "wrap_to_fake_tensor_and_record", _fake_of)
    _put_around(builder, "get_specialized_props", _properties_of)
    _put_around(utils, "run_node", _run_node)
    _put_around(convert_frame, "_compile", _without_accelerator)
    skip_own_frames()


def on_gpu(example: Any) -> bool:
    """Whether a traced tensor represents a tensor on the GPU."""
    return isinstance(example, torch.Tensor) and getattr(example, _MARK, False)


def skip_own_frames() -> None:
    """Exclude the shim's functions from tracing when they run between two graphs."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "torch_shim":
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
    elif isinstance(value, type) and value.__module__ == module:
        for member in list(vars(value).values()):
            if not isinstance(member, type):
                yield from _codes_of(member, module)


def _put_around(module: types.ModuleType, name: str, around: Native) -> None:
    """Wrap a function of Dynamo's; the wrapper gets the native function as its first argument."""
    setattr(module, name, functools.partial(around, getattr(module, name)))


def _plain_to_dynamo(native: Native, value: Any) -> Any:
    return None if isinstance(value, CudaTensor) else native(value)


def _fake_of(native: Native, value: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the fake tensor for an input; for a handle, the marked fake of a CPU alias."""
    if not isinstance(value, CudaTensor):
        return native(value, *args, **kwargs)
    kind = torch.nn.Parameter if isinstance(value, torch.nn.Parameter) else torch.Tensor
    with NoTorchFunction():
        alike = torch.Tensor._make_subclass(kind, value, value.requires_grad)  # noqa: SLF001 - an alias that is no view
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
    is_gpu = _results_on_gpu(node, args, kwargs)
    if node.op == "call_method" and node.target in {"cuda", "cpu"}:
        return _marked(args[0], is_gpu=is_gpu, instead_of=args)
    args, kwargs = pytree.tree_map(_processor, (args, kwargs))
    result = native(tracer, node, args, kwargs, module)
    return pytree.tree_map(lambda item: _marked(item, is_gpu=is_gpu, instead_of=args), result)


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
    leaves, _ = pytree.tree_flatten((args, kwargs))
    return any(on_gpu(leaf) for leaf in leaves)


def _is_device(value: Any) -> bool:
    if isinstance(value, torch.device):
        return True
    return isinstance(value, str) and value.partition(":")[0] in {"cuda", "cpu"}


def _processor(value: Any) -> Any:
    return CPU if _is_device(value) and names_cuda(value) else value


def _marked(result: Any, *, is_gpu: bool, instead_of: Any = ()) -> Any:
    """Mark the result; it is cloned first if it is itself an input from the other device."""
    if not isinstance(result, FakeTensor) or on_gpu(result) == is_gpu:
        return result
    if any(result is value for value in instead_of):
        result = result.clone()
    setattr(result, _MARK, is_gpu)
    return result


def _without_accelerator(native: Native, *args: Any, **kwargs: Any) -> Any:
    """Compile with the accelerator hidden: while Dynamo traces, there is no stream to query."""
    start_s = time.perf_counter()
    with tracing():
        result = native(*args, **kwargs)
    report.add("trace_s", time.perf_counter() - start_s)
    return result
