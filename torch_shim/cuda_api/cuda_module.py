"""Replaces torch.cuda and torch.accelerator for the redirected GPU, Triton and autocast on it."""

import contextlib
import functools
import importlib.abc
import importlib.machinery
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_shim.cuda_api import randomness, streams_and_events
from torch_shim.errors import UnsupportedCall
from torch_shim.kernels.dtypes import is_float32, widened
from torch_shim.patching import (
    DeviceLike,
    names_cuda,
    of_device,
    original_of,
    redirect,
    set_attribute,
    tracing_fakes,
)
from torch_shim.settings import ShimSettings
from torch_shim.tensors.advertised_memory import MEMORY
from torch_shim.tensors.dispatch import Handler, Operator, names, special
from torch_shim.tensors.handles import CudaTensor, run
from torch_shim.tensors.moves import DTYPES

CAPABILITY = (8, 0)  # bfloat16 and TF32, and nothing that needs kernels of a newer GPU

_NAMESPACES: tuple[ModuleType, ...] = (
    torch.cuda,
    torch.cuda.random,
    torch.cuda.memory,
    torch.cuda.graphs,
)


class DeviceProperties:
    """The result of torch.cuda.get_device_properties()."""

    def __init__(self, name: str, total_memory: int) -> None:
        self.name = name
        self.total_memory = total_memory
        self.major, self.minor = CAPABILITY
        self.multi_processor_count = 108
        self.is_integrated = 0
        self.is_multi_gpu_board = 0
        self.max_threads_per_multi_processor = 2048
        self.max_threads_per_block = 1024
        self.warp_size = 32
        self.regs_per_multiprocessor = 65536
        self.shared_memory_per_block = 49152
        self.shared_memory_per_block_optin = 166912
        self.shared_memory_per_multiprocessor = 167936
        self.L2_cache_size = 40 << 20
        self.gcnArchName = ""
        self.uuid = "00000000-0000-0000-0000-000000000000"
        self.type = "cuda"

    def __repr__(self) -> str:
        return (
            f"_CudaDeviceProperties(name='{self.name}', major={self.major}, minor={self.minor}, "
            f"total_memory={self.total_memory >> 20}MB, "
            f"multi_processor_count={self.multi_processor_count})"
        )


def install(settings: ShimSettings) -> None:
    # Launches over CUDA tensors are refused, now or when Triton is imported.
    if _LAUNCHER in sys.modules:
        _refuse_launches(sys.modules[_LAUNCHER])
    else:
        sys.meta_path.insert(0, _LauncherFinder())
    redirect(torch.autocast, "__enter__", _enter)
    redirect(torch.autocast, "__exit__", _exit)
    special.classifiers.append(_classify)
    properties = DeviceProperties(settings.gpu_name, settings.gpu_memory_bytes)
    for name, value in CONSTANTS.items():
        put(name, answering(name, value))
    put("get_device_name", of_device("get_device_name", lambda: properties.name))
    put("get_device_properties", of_device("get_device_properties", lambda: properties))
    for name, function in {**FUNCTIONS, **MEMORY}.items():
        put(name, function)
    for name, remedy in REFUSED.items():
        native = getattr(torch.cuda, name, None)
        refuse = refusing_class if isinstance(native, type) else refusing
        put(name, refuse(name, remedy))
    set_attribute(torch.cuda, "_CudaDeviceProperties", DeviceProperties)
    set_attribute(torch.cuda, "default_generators", (torch.default_generator,))
    # Keep fake CUDA tensors from calling the driver, as PyTorch does where CUDA is absent.
    set_attribute(FakeTensorMode, "avoid_device_init", property(lambda _: True))
    streams_and_events.install()
    _install_accelerator()
    _install_surroundings()


def refusing_class(name: str, remedy: str) -> type:
    """Return a class, usable in isinstance(), that raises UnsupportedCall when instantiated."""

    def new(cls: type, *_: Any, **__: Any) -> NoReturn:
        raise UnsupportedCall(f"torch.cuda.{cls.__name__}", remedy)

    return type(name, (), {"__new__": new, "__module__": "torch.cuda"})


def put(name: str, value: object) -> None:
    """Set an attribute in every namespace of torch.cuda that has it; skip the others."""
    for namespace in _NAMESPACES:
        native = getattr(namespace, name, None)
        if native is not None:
            set_attribute(value, "__wrapped__", original_of(native))
            set_attribute(namespace, name, value)


def answering(name: str, value: Any) -> Callable[..., Any]:
    """Return a new function that returns a constant: Dynamo identifies functions by identity."""

    def answer(*_: Any, **__: Any) -> Any:
        return value

    answer.__name__ = answer.__qualname__ = name
    return answer


def refusing(name: str, remedy: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise UnsupportedCall(f"torch.cuda.{name}", remedy)

    refuse.__name__ = refuse.__qualname__ = name
    return refuse


class DeviceIndex(contextlib.nullcontext[None]):
    """`with torch.accelerator.device_index(0)`: has no effect, since 0 is the only device."""

    def __init__(self, device: int | None) -> None:
        names_cuda(device)
        super().__init__()


def _same_device(device: DeviceLike) -> None:
    names_cuda(device)


def _exchange_device(device: int) -> int:
    names_cuda(max(device, 0))
    return 0


def _can_access_peer(device: DeviceLike, peer_device: DeviceLike) -> bool:
    names_cuda(device)
    names_cuda(peer_device)
    return False


def _install_accelerator() -> None:
    accelerator = torch.accelerator
    for name, value in {
        "current_accelerator": lambda *_, **__: (
            None if hidden.accelerator else torch.device("cuda")
        ),
        "device_count": lambda: 0 if hidden.accelerator else 1,
        "is_available": lambda: not hidden.accelerator,
        "current_stream": functools.partial(streams_and_events.current_stream),
        "set_stream": functools.partial(streams_and_events.set_stream),
        "get_device_capability": answering(
            "get_device_capability", {"supported_dtypes": _SUPPORTED_DTYPES}
        ),
        "current_device_index": answering("current_device_index", 0),
        "current_device_idx": answering("current_device_idx", 0),
        "set_device_index": functools.partial(_same_device),
        "set_device_idx": functools.partial(_same_device),
        "device_index": DeviceIndex,
        "synchronize": answering("synchronize", None),
        "empty_cache": answering("empty_cache", None),
        "get_memory_info": functools.partial(MEMORY["mem_get_info"]),
        **{name: functools.partial(MEMORY[name]) for name in _ACCELERATOR_MEMORY},
    }.items():
        if hasattr(accelerator, name):
            set_attribute(accelerator, name, value)


def _install_surroundings() -> None:
    set_attribute(torch.backends.cuda, "is_built", answering("is_built", True))
    for name in ("range_push", "range_pop", "mark", "range_end", "range_start"):
        if hasattr(torch.cuda.nvtx, name):
            set_attribute(torch.cuda.nvtx, name, answering(name, 0))
    for name in ("blas_workspace_size", "cublas_workspace_size"):
        if hasattr(torch.backends.cuda, name):
            set_attribute(torch.backends.cuda, name, refusing(name, _BELOW))
    # What has no meaning without the device, in modules that need not exist.
    for path, (words, remedy) in _REFUSED_IN.items():
        module = sys.modules.get(f"torch.cuda.{path}")
        for name in names(words) & set(dir(module)):
            refuse = refusing_class if isinstance(getattr(module, name), type) else refusing
            set_attribute(module, name, refuse(f"{path}.{name}", remedy))


_SUPPORTED_DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_ACCELERATOR_MEMORY = names(
    "max_memory_allocated max_memory_reserved memory_allocated memory_reserved memory_stats "
    "reset_accumulated_memory_stats reset_peak_memory_stats"
)

CONSTANTS: dict[str, Any] = {
    **dict.fromkeys(
        names("is_available is_initialized _is_compiled is_bf16_supported is_tf32_supported"), True
    ),
    **dict.fromkeys(names("is_current_stream_capturing _is_in_bad_fork"), False),
    **dict.fromkeys(names("device_count _device_count_nvml"), 1),
    **dict.fromkeys(names("current_device get_sync_debug_mode utilization memory_usage"), 0),
    **dict.fromkeys(
        names(
            "_lazy_init init _check_capability _check_cubins synchronize empty_cache ipc_collect "
            "set_sync_debug_mode"
        )
    ),
    "get_arch_list": ["sm_80"],
    "get_gencode_flags": "-gencode compute=compute_80,code=sm_80",
    "get_allocator_backend": "native",
}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "set_device": _same_device,
    "_exchange_device": _exchange_device,
    "_maybe_exchange_device": functools.partial(_exchange_device),
    "get_device_capability": of_device("get_device_capability", lambda: CAPABILITY),
    "can_device_access_peer": _can_access_peer,
    **randomness.FUNCTIONS,
}
_BELOW = "call nothing below PyTorch"
# Names by module of torch.cuda, and the remedy.
_REFUSED_IN = {
    "nccl": (
        "all_reduce reduce broadcast all_gather reduce_scatter init_rank",
        "there is one GPU: leave collective operations out",
    ),
    "profiler": ("start stop", "profile on the node: the GPU is not in this process"),
    "memory": (
        "_record_memory_history _set_memory_metadata _get_memory_metadata",
        "leave it out: the device's allocator is in another process",
    ),
    "green_contexts": ("GreenContext get_num_locality_domains is_localization_supported", _BELOW),
    "sparse": (" ".join(DTYPES), "make a tensor by torch.sparse_coo_tensor(..., device='cuda')"),
    "tunable": ("get_results get_rotating_buffer_size get_validators tune_gemm_in_file", _BELOW),
    "jiterator": (
        "_create_jit_fn _create_multi_output_jit_fn",
        "write it with PyTorch's operators",
    ),
    "gds": ("GdsFile gds_deregister_buffer gds_register_buffer", "read into a CPU tensor"),
}
_REMEDIES = {
    "leave it out: what can be captured is run as a graph anyway": (
        "CUDAGraph graph graph_pool_handle make_graphed_callables"
    ),
    "allocate without a pool": "MemPool use_mem_pool",
    "allocate as PyTorch does by default": "CUDAPluggableAllocator change_current_allocator",
    "use torch.empty(..., device='cuda')": "caching_allocator_alloc caching_allocator_delete",
    _BELOW: "cudart current_blas_handle current_solver_handle GreenContext _sleep",
    "ask the node": "temperature power_draw clock_rate",
}
REFUSED = {name: remedy for remedy, words in _REMEDIES.items() for name in words.split()}


class _Hidden(threading.local):
    """What is hidden in this thread: from Dynamo the accelerator, while Dynamo traces."""

    accelerator = False


hidden = _Hidden()


# Kernels that a program compiles for the GPU itself: Triton's are refused with a remedy.
#
# Triton is imported by the program, perhaps long after torch, so its launcher is replaced right
# after the import of the module that has it.

_LAUNCHER = "triton.runtime.jit"


class _LauncherFinder(importlib.abc.MetaPathFinder):
    """Adds a step to the loader of Triton's launcher."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _LAUNCHER:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _refuse_launches(module)

            vars(spec.loader)["exec_module"] = exec_module
        return spec


def _refuse_launches(module: ModuleType) -> None:
    redirect(module.JITFunction, "run", _launch)


def _launch(native: Callable[..., Any], self: Any, /, *args: Any, **kwargs: Any) -> Any:
    if any(isinstance(value, CudaTensor) for value in (*args, *kwargs.values())):
        remedy = "write it with PyTorch's operators, which run in graphs on the worker"
        raise UnsupportedCall("a Triton kernel", remedy)
    return native(self, *args, **kwargs)


# torch.autocast('cuda'): enabled for the CPU too, where the function's own arithmetic runs.

_SAVED = "_gpufaas_saved"


def _enter(native: Callable[..., Any], self: Any) -> Any:
    result = native(self)
    if self.device == "cuda" and not (torch.compiler.is_dynamo_compiling() or tracing_fakes()):
        # A stack: one instance used as a decorator may be entered again by a recursion.
        saved = self.__dict__.setdefault(_SAVED, [])
        saved.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
        torch.set_autocast_enabled("cpu", torch.is_autocast_enabled("cuda"))
        torch.set_autocast_dtype("cpu", torch.get_autocast_dtype("cuda"))
    return result


def _exit(native: Callable[..., Any], self: Any, *reason: Any) -> Any:
    saved = self.__dict__.get(_SAVED)
    if saved:
        enabled, dtype = saved.pop()
        torch.set_autocast_enabled("cpu", enabled)
        torch.set_autocast_dtype("cpu", dtype)
    return native(self, *reason)


def _in_float32(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run in float32 an operator that only CUDA's autocast, not the CPU's, runs in float32."""
    if torch.is_autocast_enabled("cuda"):
        args, kwargs = widened(args, kwargs, CudaTensor)
    return run(func, args, kwargs)


def _classify(operator: Operator) -> Handler | None:
    return _in_float32 if is_float32(getattr(operator, "__name__", "")) else None
