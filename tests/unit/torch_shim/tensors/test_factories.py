"""Tensors made on the GPU by name, and random numbers."""

import pytest

from tests.kit.programs.snippets import Snippet

_CALLS = """
torch.zeros(2, device="cuda") | torch.ones((2,), device=0) | torch.empty(2, device="cuda:0") |
torch.full((2,), 1.0, device=torch.device("cuda")) | torch.rand(2, device="cuda") |
torch.randn(2, device="cuda", dtype=torch.float64) | torch.randint(0, 5, (3,), device="cuda") |
torch.randperm(4, device="cuda") | torch.arange(3, device="cuda") | torch.eye(2, device="cuda") |
torch.linspace(0, 1, 3, device="cuda") | torch.logspace(0, 1, 3, device="cuda") |
torch.tensor([1.0], device="cuda") | torch.as_tensor([1], device="cuda") |
torch.as_tensor(torch.ones(2), device="cuda") | torch.asarray([1], device="cuda") |
torch.normal(0.0, 1.0, (2,), device="cuda") | torch.tril_indices(2, 2, device="cuda") |
torch.hann_window(4, device="cuda") | torch.scalar_tensor(1.0, device="cuda") |
torch.empty_strided((2,), (1,), device="cuda") | torch.fft.fftfreq(4, device="cuda") |
torch.zeros_like(c, device="cuda") | torch.randn_like(c, device="cuda") |
torch.zeros_like(g) | torch.full_like(g, 2.0) | torch.rand_like(g) | torch.empty_like(g) |
c.new_zeros(2, device="cuda") | c.new_tensor([1], device="cuda") | c.new_full((2,), 1.0, device=0) |
g.new_zeros(2) | g.new_tensor([1]) | g.new(2) | g.new_empty(2) | torch.asarray(g) |
torch.cuda.FloatTensor([1, 2]) | torch.cuda.LongTensor(2, 3) | torch.bernoulli(g * 0.5) |
torch.multinomial(g, 2) | torch.nn.functional.dropout(g) | g.clone().normal_() |
torch.bucketize(g, g) | torch.signal.windows.hann(4, device="cuda")
"""


@pytest.fixture(scope="module")
def calls() -> list[str]:
    return [" ".join(call.split()) for call in _CALLS.split("|")]


def test_factory_makes_a_gpu_tensor_when_named_so(shim: Snippet, calls: list[str]) -> None:
    shim(f"""
    c, g = torch.ones(2), torch.ones(2).cuda()
    for call in {calls!r}:
        made = eval(call)
        assert made.is_cuda and made.device == torch.device("cuda", 0), call
    """)


def test_factory_makes_a_cpu_tensor_when_not_named(shim: Snippet) -> None:
    shim("""
    import warnings
    g = torch.ones(2).cuda()
    assert type(torch.zeros(2)) is torch.Tensor and torch.zeros(2, device="cpu").is_cpu
    assert torch.zeros_like(g, device="cpu").is_cpu and g.new_zeros(2, device="cpu").is_cpu
    assert torch.tensor([g[0], g[1]]).is_cpu  # a list of tensors is data, as natively
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.tensor(g).is_cuda and torch.tensor(g, device="cpu").is_cpu
    assert torch.zeros(2, device="meta").is_meta
    """)


def test_default_device_is_the_gpu_when_set(shim: Snippet) -> None:
    shim("""
    torch.set_default_device("cuda")
    assert torch.get_default_device() == torch.device("cuda", 0)
    layer = torch.nn.Linear(2, 2)
    assert layer.weight.is_cuda and layer(torch.ones(1, 2)).is_cuda
    assert torch.tensor([1]).is_cuda and torch.randn(2).is_cuda
    assert torch.ones(2, device="cpu").is_cpu
    torch.set_default_device(None)
    assert torch.ones(2).is_cpu
    with torch.device("cuda"):
        assert torch.zeros(2).is_cuda and torch.randperm(3).is_cuda
    with torch.device("meta"):
        assert torch.zeros(2).is_meta and torch.nn.Linear(2, 2).weight.is_meta
    assert torch.zeros(2).is_cpu
    """)


def test_default_tensor_type_is_the_gpu_s_when_set(shim: Snippet) -> None:
    shim("""
    import warnings
    warnings.simplefilter("ignore")
    torch.set_default_tensor_type("torch.cuda.DoubleTensor")
    assert torch.ones(1).is_cuda and torch.ones(1).dtype == torch.float64
    torch.set_default_tensor_type(torch.FloatTensor)
    assert torch.ones(1).is_cpu and torch.ones(1).dtype == torch.float32
    """)


def test_tensor_type_tells_gpu_tensors_when_asked(shim: Snippet) -> None:
    shim("""
    x = torch.ones(2).cuda()
    assert isinstance(x, torch.cuda.FloatTensor) and not isinstance(x, torch.cuda.HalfTensor)
    assert not isinstance(torch.ones(2), torch.cuda.FloatTensor)
    """)


def test_random_numbers_equal_the_cpu_s_when_seeded_alike(shim: Snippet) -> None:
    shim("""
    torch.manual_seed(1)
    expected = torch.randn(3), torch.rand(2), torch.nn.functional.dropout(torch.ones(50))
    for seed in (torch.manual_seed, torch.cuda.manual_seed, torch.cuda.manual_seed_all):
        seed(1)
        x = torch.ones(50).cuda()
        found = torch.randn(3, device="cuda"), torch.rand(2), torch.nn.functional.dropout(x)
        assert all(a.equal(b.cpu()) for a, b in zip(expected, found))
    """)


def test_random_state_is_restored_when_set_or_forked(shim: Snippet) -> None:
    shim("""
    x = torch.ones(4).cuda()
    state = torch.cuda.get_rng_state()
    first = torch.rand_like(x)
    torch.cuda.set_rng_state(state)
    assert first.equal(torch.rand_like(x))
    torch.cuda.set_rng_state_all([state])
    with torch.random.fork_rng():
        torch.rand(5, device="cuda")
    with torch.random.fork_rng(devices=[0]):
        torch.rand(5, device="cuda")
    assert first.equal(torch.rand_like(x)) and torch.cuda.initial_seed() == torch.initial_seed()
    """)


def test_generator_is_on_the_gpu_when_made_there(shim: Snippet) -> None:
    shim("""
    generator = torch.Generator(device="cuda").manual_seed(4)
    assert isinstance(generator, torch.Generator) and generator.device.type == "cuda"
    assert isinstance(torch.default_generator, torch.Generator)
    assert torch.Generator().device.type == "cpu"
    first = torch.randn(4, device="cuda", generator=generator)
    second = torch.ones(3).cuda().uniform_(generator=generator)
    generator.manual_seed(4)
    assert first.equal(torch.randn(4, device="cuda", generator=generator)) and second.is_cuda
    state = torch.random.get_rng_state()
    torch.randn(4, device="cuda", generator=generator)
    assert state.equal(torch.random.get_rng_state())
    """)


def test_allocation_raises_out_of_memory_when_larger_than_the_gpu(shim: Snippet) -> None:
    shim("""
    for ask in (
        lambda: torch.empty(9 << 30, dtype=torch.uint8, device="cuda"),
        lambda: torch.empty(1 << 50, device="cuda"),
        lambda: torch.empty(1, dtype=torch.uint8).expand(9 << 30).cuda(),
    ):
        try:
            ask()
        except torch.cuda.OutOfMemoryError as error:
            assert "CUDA out of memory" in str(error)
        else:
            raise AssertionError
    """)


def test_allocation_raises_out_of_memory_when_the_gpu_is_full(shim: Snippet) -> None:
    shim("""
    held = []
    try:
        while True:
            held.append(torch.empty(1 << 30, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError:
        assert len(held) == 8
    assert torch.cuda.memory_allocated() == 8 << 30
    assert torch.cuda.mem_get_info() == (0, 8 << 30)
    del held
    assert torch.cuda.memory_allocated() == 0 and torch.cuda.max_memory_allocated() == 8 << 30
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == 0
    """)


def test_peak_is_that_of_large_tensors_when_they_are_gone(shim: Snippet) -> None:
    shim("""
    for _ in range(2):
        first = torch.empty(300 << 20, dtype=torch.uint8, device="cuda")
        second = torch.empty(300 << 20, dtype=torch.uint8).cuda()
        del first, second
        assert torch.cuda.memory_allocated() == 0
        assert torch.cuda.max_memory_allocated() == 600 << 20
        torch.cuda.reset_peak_memory_stats()
    """)


def test_memory_is_counted_when_other_objects_are_of_equal_or_unhashable_classes(
    shim: Snippet,
) -> None:
    shim("""
    class Own(torch.Tensor):
        pass

    class Metaclass(type):
        def __eq__(cls, other):
            return NotImplemented

    class Unhashable(metaclass=Metaclass):
        def __init__(self):
            self.others = []

    kept = torch.ones(1024, device="cuda").as_subclass(Own), Unhashable()
    on_cpu = [torch.empty(6 << 30, dtype=torch.uint8).as_subclass(Own) for _ in range(2)]
    large = torch.empty(300 << 20, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() == 4096 + (300 << 20)
    """)


def test_memory_counts_handles_of_every_class_unseen_by_function_modes(shim: Snippet) -> None:
    shim("""
    from torch.overrides import TorchFunctionMode

    class Own(torch.Tensor):
        pass

    class Names(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **kwargs or {})

    seen = []
    kept = [torch.ones(1024, device="cuda") for _ in range(3)]
    kept[0] = torch.nn.Parameter(kept[0])
    kept[1] = kept[1].as_subclass(Own)
    kept.append(kept[2][:5])
    with Names():
        assert torch.cuda.memory_allocated() == 3 * 4096
    assert not seen

    def inside(x):
        assert torch.cuda.memory_allocated() == 3 * 4096
        return x

    torch.vmap(inside)(kept[2])
    """)
