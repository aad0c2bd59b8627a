"""Entries of what people write around a model: modules of their own, changes, surroundings."""

from collections.abc import Iterator

from compat.entry import Entry

WAYS_TO_CHANGE_WEIGHTS = (
    ("in_place", "detached", "out_argument", "foreach", "initialised"),
    ("data_in_place", "kept_view", "data_view", "data_element", "data_assigned"),
    ("loaded", "copied_back", "applied", "vector"),
    ("optimised", "replaced", "swapped"),
)


_SAME_DEVICE = "Expected all tensors to be on the same device"
MIXED_DEVICES = {
    "model": _SAME_DEVICE,
    "called_before": _SAME_DEVICE,
    "convolution": _SAME_DEVICE,
    "embedding": _SAME_DEVICE,
    "sum": _SAME_DEVICE,
    "product": _SAME_DEVICE,
    "joined": _SAME_DEVICE,
    "indexed": "indices should be either on cpu or on the same device",
    "half_moved": _SAME_DEVICE,
}
QUICK = {"odd_rows", "only_in_thread", "square_root"}


def _custom_modules() -> Iterator[Entry]:
    for program in ("control_flow", "inplace_updates", "structured_data"):
        yield Entry(program, quick=True)
    yield Entry("hooks", quick=True, trains=True)
    yield Entry("custom_function", trains=True)
    for program in ("loops_and_branches", "numpy_numbers", "selected_values"):
        yield Entry(program, quick=True)
    for program in (
        "early_exit",
        "aliased_outputs",
        "running_buffers",
        "shared_weights",
        "submodule_calls",
        "nested_models",
        "mixture_of_experts",
        "changing_shapes",
        "key_value_cache",
        "graph_network",
        "audio_spectra",
        "dropout_seeded",
        "exceptions",
        "lazy_and_meta",
        "functional_calls",
    ):
        yield Entry(program)


def _precision_and_training() -> Iterator[Entry]:
    yield Entry("input_gradients", quick=True, trains=True)
    for program in (
        "half_precision",
        "bfloat16_model",
        "autocast_mixed",
        "channels_last",
        "double_and_complex",
    ):
        yield Entry(program)
    for optimizer in ("Adam", "SGD", "RMSprop"):
        yield Entry("training_steps", (optimizer,), trains=True)
    for program in ("mixed_training", "weight_averaging"):
        yield Entry(program, trains=True)
    yield Entry("checkpointed_training", quick=True, trains=True)
    yield Entry("inference_forward", quick=True)
    yield Entry("compiled_functions", quick=True)


def _changes() -> Iterator[Entry]:
    for ways in WAYS_TO_CHANGE_WEIGHTS:
        yield Entry("changed_weights", ways, quick="kept_view" in ways)
    for program in (
        "changed_buffers",
        "changed_hooks",
        "changed_modes",
        "changed_modules",
        "changed_inputs",
        "edited_state",
    ):
        yield Entry(program)
    yield Entry("changed_attributes", quick=True)


def _surroundings() -> Iterator[Entry]:
    for program in ("threaded_requests", "device_queries", "save_and_load"):
        yield Entry(program, quick=True)
    for program in (
        "script_module",
        "traced_module",
        "data_loading",
        "safetensors_files",
        "streams_and_events",
        "default_device",
        "several_models",
        "thread_pool",
        "asyncio_requests",
        "forked_processes",
        "queued_process",
        "data_parallel",
        "raw_memory",
    ):
        yield Entry(program)
    for program in ("random_numbers", "tensor_arithmetic"):
        yield Entry(program, has_model=False)
    for way in ("module", "method", "function", "graphs"):
        yield Entry("compiled_model", (way,))
    for method in ("fork", "spawn", "forkserver"):
        yield Entry("worker_processes", (method,))


def _threads_and_data() -> Iterator[Entry]:
    for program, ways in {
        "large_results": "odd_rows megabyte parts empty masks",
        "threads_and_models": (
            "only_in_thread first_here pool model_of_each arguments batching web_server"
        ),
        "forward_with_numpy": "square_root attribute table integers whole",
    }.items():
        for way in ways.split():
            yield Entry(program, (way,), quick=way in QUICK)
    yield Entry("streams_of_device")


def _refusals() -> Iterator[Entry]:
    for kind, words in MIXED_DEVICES.items():
        quick = kind == "called_before"
        yield Entry("mixed_devices", (kind,), quick=quick, refusal=words, raises="RuntimeError")
    yield Entry("cuda_graphs", refusal="CUDAGraph")
    for kind in ("tensor", "factory", "module", "set_device"):
        yield Entry(
            "two_devices",
            (kind,),
            refusal="invalid device ordinal",
            raises="torch.AcceleratorError",
        )


def everyday_entries() -> Iterator[Entry]:
    """All of them."""
    yield from _custom_modules()
    yield from _precision_and_training()
    yield from _changes()
    yield from _surroundings()
    yield from _threads_and_data()
    yield from _refusals()
