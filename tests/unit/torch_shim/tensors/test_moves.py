"""Moving tensors between CPU and GPU."""

import pytest

from tests.kit.programs.snippets import Snippet


@pytest.mark.parametrize(
    "call",
    [
        'c.to("cuda")',
        "c.to(0)",
        "c.cuda()",
        'c.cuda("cuda:0", non_blocking=True)',
        'c.to(torch.device("cuda"), torch.float64)',
        'c.to(device="cuda", dtype=torch.float16, non_blocking=True)',
        "c.to(g)",
        "c.to(other=g)",
        "c.type_as(g)",
        'c.type("torch.cuda.FloatTensor")',
        "c.type(torch.cuda.HalfTensor)",
        "c.pin_memory().to(0, non_blocking=True)",
    ],
)
def test_move_copies_when_going_to_the_gpu(shim: Snippet, call: str) -> None:
    shim(f"""
    c, g = torch.ones(3), torch.zeros(3).cuda()
    moved = {call}
    assert moved.is_cuda and moved.tolist() == [1, 1, 1]
    moved.zero_()
    assert type(c) is torch.Tensor and c.tolist() == [1, 1, 1]
    """)


@pytest.mark.parametrize(
    "call",
    [
        "g.cpu()",
        'g.to("cpu")',
        'g.to(device="cpu", dtype=torch.float64)',
        "g.to(c)",
        "g.type_as(c)",
        'g.type("torch.FloatTensor")',
        "g.type(torch.DoubleTensor)",
        "torch.as_tensor(g, device='cpu')",
        "torch.from_numpy(g.cpu().numpy())",
    ],
)
def test_move_copies_when_going_to_the_cpu(shim: Snippet, call: str) -> None:
    shim(f"""
    c, g = torch.ones(3), torch.zeros(3).cuda()
    moved = {call}
    assert moved.device.type == "cpu" and type(moved) is torch.Tensor
    moved.fill_(1)
    assert g.is_cuda and g.tolist() == [0, 0, 0]
    """)


def test_move_returns_the_tensor_itself_when_it_is_there(shim: Snippet) -> None:
    shim("""
    c, g = torch.ones(3), torch.zeros(3).cuda()
    assert g.to("cuda") is g and g.cuda() is g and g.to(0) is g and g.to(g) is g
    assert c.to("cpu") is c and c.cpu() is c and torch.as_tensor(g) is g
    assert g.to("cuda", copy=True) is not g and g.to(torch.float16).is_cuda
    assert g.half().is_cuda and g.type(torch.float64).is_cuda and g.to("meta").is_meta
    """)


@pytest.mark.parametrize(
    "call",
    ['c.to("cuda:1")', "c.cuda(1)", "c.to(3)", 'torch.ones(2, device="cuda:1")'],
)
def test_move_raises_when_there_is_no_such_gpu(shim: Snippet, call: str) -> None:
    shim(f"""
    c = torch.ones(2)
    try:
        {call}
    except RuntimeError as error:
        assert "invalid device ordinal" in str(error)
    else:
        raise AssertionError
    """)


def test_move_raises_when_there_is_no_data(shim: Snippet) -> None:
    shim("""
    try:
        torch.empty(2, device="meta").cuda()
    except NotImplementedError as error:
        assert "Cannot copy out of meta tensor" in str(error)
    else:
        raise AssertionError
    """)


def test_gradient_crosses_back_when_a_move_is_differentiated(shim: Snippet) -> None:
    shim("""
    x = torch.ones(3, requires_grad=True)
    (x.cuda() * 2).sum().backward()
    assert type(x.grad) is torch.Tensor and x.grad.is_cpu and x.grad.tolist() == [2, 2, 2]
    """)


def test_memory_is_pinned_when_asked_for(shim: Snippet) -> None:
    shim("""
    c = torch.ones(3)
    pinned = c.pin_memory()
    assert pinned.is_pinned() and not c.is_pinned() and pinned.pin_memory() is pinned
    assert torch.empty(3, pin_memory=True).is_pinned() and not c.cuda().is_pinned()
    try:
        c.cuda().pin_memory()
    except RuntimeError as error:
        assert "only dense CPU tensors can be pinned" in str(error)
    else:
        raise AssertionError
    """)


def test_batches_are_pinned_when_a_loader_pins_them(shim: Snippet) -> None:
    shim("""
    data = torch.utils.data.TensorDataset(torch.arange(8.0))
    for workers in (0, 1):
        loader = torch.utils.data.DataLoader(
            data, batch_size=4, pin_memory=True, num_workers=workers
        )
        for (batch,) in loader:
            assert batch.is_pinned() and batch.to("cuda", non_blocking=True).is_cuda
    """)


def test_tensor_is_shared_when_passed_to_another_process(shim: Snippet) -> None:
    shim("""
    import torch.multiprocessing as mp
    from torch_shim.tensors.write_epochs import mark_of
    def work(to, back):
        x, weight = to.get()
        assert x.is_cuda and isinstance(weight, torch.nn.Parameter) and weight.is_cuda
        x.add_(1)
        back.put(torch.full((2,), 3.0).cuda())
        to.get()
    context = mp.get_context("fork")
    to, back = context.Queue(), context.Queue()
    child = context.Process(target=work, args=(to, back))
    child.start()
    x = torch.ones(3).cuda()
    to.put((x, torch.nn.Parameter(torch.zeros(2).cuda())))
    answer = back.get()
    assert answer.is_cuda and answer.tolist() == [3, 3] and x.tolist() == [2, 2, 2]
    assert mark_of(x).untracked  # the other process writes unseen
    to.put(None)
    child.join()
    assert child.exitcode == 0
    """)


def test_tensor_without_data_moves_without_data(shim: Snippet) -> None:
    shim("""
        from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
        with FakeTensorMode():
            fake = torch.ones(2, 3)
        for moved in (fake.to("cuda"), fake.cuda(), fake.to(torch.device("cuda", 0))):
            assert type(moved) is FakeTensor and moved.device == torch.device("cuda:0"), moved
            assert moved.cpu().device.type == "cpu" and moved.shape == (2, 3)
    """)


_IN_PLACE = [
    'x.to("cuda")',
    "x.to(0, x.dtype)",
    'x.to(device="cuda")',
    "x.to(x)",
    "x.cuda()",
    "x.type(x.dtype)",
    'x.type("torch.cuda.FloatTensor")',
    "x.type_as(x)",
    'torch.as_tensor(x, device="cuda")',
    'torch.asarray(x, device="cuda")',
]


@pytest.mark.parametrize("around", ['torch.device("cuda")', 'torch.device("cpu")', "Mode()"])
def test_gpu_tensor_is_moved_to_the_gpu_as_itself_when_a_function_mode_is_on(
    shim: Snippet, around: str
) -> None:
    shim(f"""
    from torch.overrides import TorchFunctionMode

    class Mode(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            return function(*args, **kwargs or {{}})

    net = torch.nn.Linear(2, 2, device="cuda")
    with {around}:
        for x in (torch.zeros(3, device="cuda"), net.weight):
            for call in {_IN_PLACE!r}:
                assert eval(call) is x, call
        net.cuda()
        assert torch.zeros(2, device="cuda").cpu().is_cpu
        assert net.weight is x and torch.zeros(2, device="cpu").to("cuda").is_cuda
    """)


def test_error_names_torchs_function_when_a_mode_returns_not_implemented(shim: Snippet) -> None:
    shim("""
    from torch.overrides import TorchFunctionMode

    class Refusing(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            return NotImplemented

    x = torch.ones(2, device="cuda")
    for call, name in {
        "x.cpu()": "torch.Tensor.cpu",
        "x.to(torch.float64)": "torch.Tensor.to",
        "x.pin_memory()": "torch.Tensor.pin_memory",
        "torch.zeros(2)": "torch.zeros",
    }.items():
        try:
            with Refusing():
                eval(call)
        except TypeError as error:
            assert f"'{name}'" in str(error), error
        else:
            raise AssertionError(call)
    """)


def test_function_mode_sees_a_call_once_and_nothing_of_its_inside(shim: Snippet) -> None:
    shim("""
    import contextlib
    from torch.overrides import TorchFunctionMode

    class Names(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function.__name__)
            return function(*args, **kwargs or {})

    class Own(torch.Tensor):
        pass

    x, z, c = torch.ones(2, 3, device="cuda"), torch.ones((), device="cuda"), torch.ones(2)
    for call, name in {
        "x.cpu()": "cpu",
        'x.to("cpu")': "to",
        "x.cuda()": "cuda",
        "c.cuda()": "cuda",
        "x.type(torch.float64)": "type",
        "c.type_as(x)": "type_as",
        "c.pin_memory()": "pin_memory",
        "x.is_pinned()": "is_pinned",
        "x.as_subclass(Own)": None,
        "x.untyped_storage()": "untyped_storage",
        "x.numpy(force=True)": "numpy",
        "x.get_device()": "get_device",
        "x.new_zeros(2)": "new_zeros",
        "repr(x)": "__repr__",
        "repr(torch.nn.Parameter(x))": "__repr__",
        'format(z, ".1f")': "__format__",
        'torch.ones(2, device="cuda")': "ones",
        "torch.zeros_like(x)": "zeros_like",
        'torch.tensor([1.0], device="cuda")': "tensor",
        'torch.as_tensor(x, device="cpu")': "as_tensor",
    }.items():
        outside = eval(call)
        for modes in (1, 2):
            seen = []
            with Names(), Names() if modes == 2 else contextlib.nullcontext():
                inside = eval(call)
            assert seen == ([name] * modes if name else []), (call, seen)
            assert type(inside) is type(outside), call
            assert not isinstance(inside, str) or inside == outside, (inside, outside)
    """)
