"""The table of names that mean CUDA, in PyTorch and other packages, with their outcomes.

A key is a dotted name; a name that is absent has the rule of its longest prefix in the table.
`name(keyword)` is a call with that keyword, `.name()` a call of that method of any object.
"""

from collections.abc import Iterator

from gpufaas.check.findings import UseOutcome, UseRule

REDIRECTED = UseRule(UseOutcome.REDIRECTED)
OTHER_GPU = UseRule(UseOutcome.CANNOT, "a function has one GPU", "use cuda, or cuda:0")

_ANSWER = UseRule(UseOutcome.LOCAL, "describes the one redirected GPU")
_IN_ORDER = UseRule(UseOutcome.LOCAL, "calls run in order: nothing is ever pending")
_MEMORY = UseRule(UseOutcome.LOCAL, "counts the function's own tensors against the GPU's memory")
_RANDOM = UseRule(UseOutcome.LOCAL, "a stream of random numbers of the function's own")
_NOTHING = UseRule(UseOutcome.LOCAL, "does nothing here")
_TUNING = UseRule(
    UseOutcome.LOCAL, "not passed on: the worker sets what suits its GPU", "leave it out"
)

_ARITHMETIC = UseRule(UseOutcome.REDIRECTED, "the worker computes so too", "")

_NO_KERNELS = "needs a GPU in the function itself"
_OTHER_LIBRARY = "uses the GPU without PyTorch"
_UNKNOWN = UseRule(UseOutcome.CANNOT, "the shim does not know it", "leave it out")
_NO_DRIVER = UseRule(
    UseOutcome.CANNOT, "there is no driver in the function", "ask torch.cuda.mem_get_info()"
)
_GRAPHS = UseRule(
    UseOutcome.CANNOT,
    "no CUDA graph can be made by hand",
    "leave it out: what can be captured is run as a graph anyway",
)
_POOL = UseRule(UseOutcome.CANNOT, "no allocator to choose", "allocate without a pool")
_ALLOCATOR = UseRule(
    UseOutcome.CANNOT, "no allocator to choose", "allocate as PyTorch does by default"
)
_RAW = UseRule(
    UseOutcome.CANNOT, "no address on the GPU is known", "use torch.empty(..., device='cuda')"
)
_BELOW = UseRule(UseOutcome.CANNOT, _NO_KERNELS, "call nothing below PyTorch")
_SENSOR = UseRule(UseOutcome.CANNOT, "the GPU is the node's", "ask the node")
_ONE_PROCESS = UseRule(
    UseOutcome.CANNOT, "events are not shared between processes", "use an event of one process"
)
_STREAM = UseRule(UseOutcome.CANNOT, "there is no stream outside", "use torch.cuda.Stream()")
_EXPORT = UseRule(
    UseOutcome.LOCAL, "refused for a tensor on the GPU", "export tensor.cpu() instead"
)
_DISTRIBUTED_TENSORS = UseRule(
    UseOutcome.LOCAL, "refused for a tensor on the GPU", "there is one GPU: use plain tensors"
)
_ONE_MEMBER = UseRule(
    UseOutcome.LOCAL, "works in one process, over Gloo", "start one process: several are refused"
)
_NCCL = UseRule(
    UseOutcome.CANNOT,
    "GPUs are not connected to each other here",
    "there is one GPU: leave collective operations out",
)
_KERNELS = UseRule(UseOutcome.CANNOT, _NO_KERNELS, "write it with PyTorch's operators")
_PAST_PYTORCH = UseRule(UseOutcome.CANNOT, _OTHER_LIBRARY, "use PyTorch for what runs on the GPU")
_SCRIPT = UseRule(
    UseOutcome.LOCAL,
    "TorchScript runs on the function's own processor",
    "call the module itself, unscripted",
    heavy=True,
)
_FRAMEWORK = UseRule(
    UseOutcome.LOCAL,
    "runs on the function's own processor",
    "use PyTorch for what shall run on the GPU",
    heavy=True,
)
_DISABLED = UseRule(
    UseOutcome.LOCAL,
    "keeps its work out of graphs",
    "take it away, or keep it off models",
    heavy=True,
)
_OWN_OPERATOR = UseRule(
    UseOutcome.LOCAL,
    "workers know PyTorch's own operators only",
    "write it with PyTorch's operators",
    heavy=True,
)
_TRAINING = UseRule(
    UseOutcome.LOCAL,
    "gradients are computed on the function's own processor",
    "train elsewhere; under torch.no_grad() models stay on the GPU",
    heavy=True,
)

_TABLE: tuple[tuple[UseRule, str, str], ...] = (
    # Rule, what the names begin with, the names.
    (_UNKNOWN, "", "torch.cuda"),
    (
        REDIRECTED,
        "torch.cuda.",
        """amp device device_of OutOfMemoryError FloatTensor DoubleTensor HalfTensor BFloat16Tensor
        ByteTensor CharTensor ShortTensor IntTensor LongTensor BoolTensor""",
    ),
    (
        REDIRECTED,
        "torch.",
        "compile nn.DataParallel nn.parallel.DataParallel nn.parallel.data_parallel",
    ),
    (
        _ANSWER,
        "torch.cuda.",
        """is_available is_initialized _is_compiled is_bf16_supported is_tf32_supported
        is_current_stream_capturing _is_in_bad_fork device_count _device_count_nvml current_device
        set_device _exchange_device _maybe_exchange_device get_device_name get_device_properties
        get_device_capability can_device_access_peer get_arch_list get_gencode_flags utilization
        memory_usage get_allocator_backend get_sync_debug_mode list_gpu_processes default_generators
        has_half has_magma cudaStatus CudaError DeferredCudaCallError random memory streams sparse
        AcceleratorError nccl.is_available nccl.version""",
    ),
    (
        _ANSWER,
        "torch.",
        "accelerator backends.cuda.is_built backends.cudnn.is_available version.cuda",
    ),
    (_ANSWER, "torch.backends.cudnn.", "version is_acceptable"),
    (
        _NOTHING,
        "torch.cuda.",
        """_lazy_init init _check_capability _check_cubins empty_cache ipc_collect check_error
        set_sync_debug_mode nvtx caching_allocator_enable caching_allocator_disabled""",
    ),
    (
        _IN_ORDER,
        "torch.cuda.",
        """synchronize Stream Event StreamContext stream set_stream current_stream
        default_stream""",
    ),
    (
        _MEMORY,
        "torch.cuda.",
        """memory_allocated max_memory_allocated memory_reserved max_memory_reserved memory_cached
        max_memory_cached reset_peak_memory_stats reset_max_memory_allocated reset_max_memory_cached
        reset_accumulated_memory_stats mem_get_info memory_stats memory_stats_as_nested_dict
        memory_summary memory_snapshot device_memory_used set_per_process_memory_fraction
        get_per_process_memory_fraction host_memory_stats host_memory_stats_as_nested_dict
        reset_accumulated_host_memory_stats reset_peak_host_memory_stats""",
    ),
    (
        _RANDOM,
        "torch.cuda.",
        """manual_seed manual_seed_all seed seed_all initial_seed get_rng_state set_rng_state
        get_rng_state_all set_rng_state_all""",
    ),
    (
        _ARITHMETIC,
        "torch.",
        """backends.cudnn.allow_tf32 backends.cudnn.benchmark backends.cudnn.deterministic
        backends.cuda.matmul.allow_tf32 set_float32_matmul_precision
        use_deterministic_algorithms""",
    ),
    (_TUNING, "torch.", "backends.cuda backends.cudnn cuda.tunable nn.attention.sdpa_kernel"),
    (
        _GRAPHS,
        "torch.cuda.",
        """CUDAGraph graph graph_pool_handle make_graphed_callables graphs export_dot
        export_graph_data graph_annotations""",
    ),
    (_POOL, "torch.cuda.", "MemPool use_mem_pool"),
    (_ALLOCATOR, "torch.cuda.", "CUDAPluggableAllocator change_current_allocator"),
    (_RAW, "torch.cuda.", "caching_allocator_alloc caching_allocator_delete"),
    (
        _BELOW,
        "torch.cuda.",
        """cudart current_blas_handle current_solver_handle gds profiler _sleep GreenContext
        memory._record_memory_history ByteStorage DoubleStorage FloatStorage HalfStorage LongStorage
        IntStorage ShortStorage CharStorage BoolStorage BFloat16Storage ComplexDoubleStorage
        ComplexFloatStorage""",
    ),
    (_BELOW, "torch.backends.cuda.", "cufft_plan_cache"),
    (_SENSOR, "torch.cuda.", "temperature power_draw clock_rate"),
    (_ONE_PROCESS, "", "torch.cuda.Event(interprocess) .ipc_handle()"),
    (_STREAM, "torch.cuda.", "ExternalStream get_stream_from_external"),
    (_EXPORT, "", ".__dlpack__() torch.to_dlpack torch.utils.dlpack.to_dlpack"),
    (_NCCL, "torch.", "cuda.nccl cuda.comm"),
    (_ONE_MEMBER, "torch.", "distributed nn.parallel.DistributedDataParallel"),
    (_DISTRIBUTED_TENSORS, "torch.distributed.", "tensor"),
    (
        UseRule(UseOutcome.LOCAL, "reports that there are no other processes"),
        "torch.distributed.",
        """is_available is_initialized is_nccl_available is_gloo_available is_mpi_available
        is_torchelastic_launched""",
    ),
    (
        _KERNELS,
        "torch.",
        """cuda.jiterator utils.cpp_extension utils._triton""",
    ),
    (_KERNELS, "", "triton numba.cuda pycuda flash_attn xformers apex bitsandbytes deepspeed vllm"),
    (_PAST_PYTORCH, "", "cupy cudf cuml cugraph warp tensorrt torch_tensorrt"),
    (_FRAMEWORK, "", "onnxruntime tensorflow jax mxnet"),
    (_NO_DRIVER, "", "pynvml py3nvml nvidia_smi GPUtil gpustat"),
    (
        _SCRIPT,
        "torch.jit.",
        "script trace load freeze optimize_for_inference trace_module script_if_tracing",
    ),
    (_DISABLED, "torch.", "compiler.disable _dynamo.disable compiler.set_stance"),
    (_OWN_OPERATOR, "torch.", "library ops.load_library utils.cpp_extension.CppExtension"),
    (_TRAINING, "", ".backward() torch.autograd.grad torch.autograd.backward"),
)


def _rules() -> Iterator[tuple[str, UseRule]]:
    for rule, prefix, names in _TABLE:
        for name in names.split():
            yield prefix + name, rule


RULES: dict[str, UseRule] = dict(_rules())
# Other packages are reported where they are imported, PyTorch's names where they are used.
PACKAGES = frozenset(name for name in RULES if not name.startswith(("torch.", ".")))
# Arguments that name a device, in any function.
DEVICE_KEYWORDS = frozenset(
    {
        "device",
        "device_type",
        "map_location",
        "device_map",
        "device_ids",
        "output_device",
        "accelerator",
    }
)
# Methods that take a device.
DEVICE_METHODS = frozenset({"to", "cuda", "to_empty", "type"})


def rule_of(name: str) -> UseRule | None:
    """The rule of a dotted name, or of the longest part of it that has one."""
    while name:
        rule = RULES.get(name)
        if rule is not None:
            return rule
        name = name.rpartition(".")[0]
    return None
