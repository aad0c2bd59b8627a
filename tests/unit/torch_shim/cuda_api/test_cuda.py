"""torch.cuda and torch.accelerator: what they answer, and what they refuse."""

import pytest

from tests.kit.programs.snippets import Snippet, failures_of


def test_cuda_answers_for_one_gpu_when_asked(shim: Snippet) -> None:
    shim("""
    c = torch.cuda
    assert c.is_available() and c.is_initialized() and c.device_count() == 1
    assert c.current_device() == 0 and c.is_bf16_supported() and c.get_device_name()
    properties = c.get_device_properties("cuda")
    assert properties.total_memory == 8 << 30 and properties.name == c.get_device_name(0)
    assert c.get_device_capability() == (properties.major, properties.minor)
    c.init(), c.set_device(0), c.set_device("cuda"), c.synchronize(), c.empty_cache()
    c.memory_summary(), c.memory_stats()["allocated_bytes.all.current"], c.memory_reserved()
    with c.device(0), c.device(torch.device("cuda")), c.device_of(torch.ones(2).cuda()):
        assert c.current_device() == 0
    assert torch.get_device_module("cuda") is c
    with c.nvtx.range("name"):
        c.nvtx.range_push("a"), c.nvtx.range_pop()
    """)


def test_accelerator_answers_for_the_gpu_when_not_tracing(shim: Snippet) -> None:
    shim("""
    from torch_shim.cuda_api.cuda_module import hidden
    from torch_shim.patching import assigned
    a = torch.accelerator
    assert a.is_available() and a.device_count() == 1 and a.current_device_index() == 0
    assert a.current_accelerator() == torch.device("cuda")
    a.synchronize(), a.set_device_index(0)
    with assigned(hidden, accelerator=True):
        with assigned(hidden, accelerator=True):
            pass
        assert not a.is_available() and a.current_accelerator() is None
        assert torch.cuda.is_available()  # user code is traced too
    assert a.is_available()
    """)


def test_backend_flags_are_readable_when_there_is_a_gpu(shim: Snippet) -> None:
    shim("""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    assert torch.backends.cuda.is_built()
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.deterministic, torch.backends.cudnn.is_available()
    torch.set_float32_matmul_precision("high")
    x = torch.ones(1, 2, 4, 8, device="cuda")
    with sdpa_kernel(SDPBackend.MATH):
        assert torch.nn.functional.scaled_dot_product_attention(x, x, x).is_cuda
    """)


def test_streams_and_events_work_when_used_in_order(shim: Snippet) -> None:
    shim("""
    c = torch.cuda
    stream, start, end = c.Stream(), c.Event(enable_timing=True), c.Event(enable_timing=True)
    with c.stream(stream):
        assert c.current_stream() is stream
        start.record()
        end.record(stream)
    with stream:
        assert c.current_stream() is stream
    with c.stream(None):
        pass
    c.current_stream().wait_stream(stream), stream.synchronize(), end.synchronize()
    assert start.elapsed_time(end) >= 0 and end.query() and stream.query()
    assert c.current_stream() is c.default_stream()
    torch.ones(2).cuda().record_stream(stream)
    try:
        c.Event().elapsed_time(end)
    except ValueError as error:
        assert "enable_timing" in str(error)
    else:
        raise AssertionError
    """)


@pytest.mark.parametrize(
    "call",
    [
        "torch.cuda.set_device(1)",
        "torch.cuda.get_device_properties(1)",
        "torch.cuda.Stream(device=2)",
        "torch.cuda.mem_get_info(1)",
    ],
)
def test_cuda_raises_when_there_is_no_such_gpu(shim: Snippet, call: str) -> None:
    shim(f"""
    try:
        {call}
    except RuntimeError as error:
        assert "invalid device ordinal" in str(error)
    else:
        raise AssertionError
    """)


NOT_REDIRECTED = (
    "torch.cuda.CUDAGraph()",
    "torch.cuda.graph(None)",
    "torch.cuda.make_graphed_callables(None, ())",
    "torch.cuda.ExternalStream(3)",
    "torch.cuda.nccl.all_reduce([])",
    "torch.cuda.cudart()",
    "torch.cuda.MemPool()",
    "torch.cuda.caching_allocator_alloc(10)",
    "torch.cuda._sleep(10)",
    "torch.cuda.profiler.start()",
    "torch.cuda.memory._record_memory_history()",
    "torch.nn.parallel.comm.broadcast(torch.ones(1).cuda(), [0, 0])",
)


def test_cuda_names_call_and_remedy_when_it_cannot_redirect(shim: Snippet) -> None:
    programs = {
        call: f"""
    name = {call!r}.partition("(")[0].rpartition(".")[2]
    try:
        {call}
    except RuntimeError as error:
        assert "gpufaas" in str(error) and name in str(error), error
    else:
        raise AssertionError
    """
        for call in NOT_REDIRECTED
    }
    failures = failures_of(shim, programs)

    assert failures == {}, "\n".join(failures.values())


def test_missing_gpu_raises_the_class_that_torch_raises(shim: Snippet) -> None:
    shim("""
    try:
        torch.ones(2, device="cuda:1")
    except getattr(torch, "AcceleratorError", RuntimeError) as error:
        assert "invalid device ordinal" in str(error)
    else:
        raise AssertionError
    """)


@pytest.mark.parametrize("device", ["", "'cuda'", "device='cuda:0'", "torch.device('cuda')", "0"])
def test_streams_and_events_of_any_device_are_the_gpus_when_it_is_named(
    shim: Snippet, device: str
) -> None:
    shim(f"""
    stream = torch.Stream({device})
    start, end = (torch.Event({device or "device=None"}, enable_timing=True) for _ in range(2))
    assert isinstance(stream, torch.cuda.Stream) and isinstance(stream, torch.Stream)
    assert isinstance(start, torch.cuda.Event) and isinstance(torch.cuda.Event(), torch.Event)
    assert stream.device == torch.device("cuda", 0)
    with stream:
        assert torch.accelerator.current_stream() is stream
        start.record(), end.record(stream)
    stream.wait_event(end), stream.synchronize(), end.synchronize()
    assert start.elapsed_time(end) >= 0
    """)
