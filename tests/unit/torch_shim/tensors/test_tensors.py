"""What a handle says about itself, and what operators do with handles."""

import pytest

from tests.kit.programs.snippets import Snippet, failures_of


def test_tensor_says_it_is_on_the_gpu_when_moved(shim: Snippet) -> None:
    shim("""
    x = torch.arange(6.0).reshape(2, 3).cuda()
    assert x.device == torch.device("cuda:0") and x.device.index == 0
    assert x.is_cuda and not x.is_cpu and x.get_device() == 0
    assert x.type() == "torch.cuda.FloatTensor" and isinstance(x, torch.Tensor)
    assert x.share_memory_() is x and x.is_shared()
    assert not hasattr(x, "__cuda_array_interface__")
    """)


def test_tensor_prints_as_pytorch_prints_it_when_on_the_gpu(shim: Snippet) -> None:
    shim("""
    x = torch.arange(3.0).cuda()
    assert repr(x) == "tensor([0., 1., 2.], device='cuda:0')", repr(x)
    assert repr(torch.nn.Parameter(x)) == (
        "Parameter containing:\\ntensor([0., 1., 2.], device='cuda:0', requires_grad=True)"
    ), repr(torch.nn.Parameter(x))
    assert f"{x.sum():.1f}" == "3.0" and str(x[1]) == "tensor(1., device='cuda:0')"
    assert type(x).__name__ == "Tensor"
    """)


@pytest.mark.parametrize(
    "call", ["x.numpy()", "numpy.array(x)", "numpy.asarray(x)", "numpy.sin(x)", "x.apply_(abs)"]
)
def test_tensor_refuses_host_access_when_on_the_gpu(shim: Snippet, call: str) -> None:
    shim(f"""
    import numpy
    x = torch.ones(2).cuda()
    try:
        {call}
    except TypeError as error:
        assert "cpu" in str(error).lower()
    else:
        raise AssertionError
    """)


def test_tensor_refuses_dlpack_export_when_on_the_gpu(shim: Snippet) -> None:
    shim("""
    x = torch.ones(2).cuda()
    for export in (torch.utils.dlpack.to_dlpack, lambda x: x.__dlpack__()):
        try:
            export(x)
        except RuntimeError as error:
            assert "tensor.cpu()" in str(error)
        else:
            raise AssertionError
    assert torch.from_dlpack(x).is_cuda and torch.from_dlpack(torch.ones(2)).is_cpu
    """)


def test_results_are_on_the_gpu_when_nested(shim: Snippet) -> None:
    shim("""
    x = torch.arange(6.0).reshape(2, 3).cuda()
    values = x.max(1)
    assert values.values.is_cuda and values.indices.is_cuda
    assert all(part.is_cuda for part in (*x, *x.split(1), *x.unbind(), *x.chunk(2)))
    assert x.unique(return_counts=True)[1].is_cuda and torch.linalg.qr(x).R.is_cuda
    assert torch.svd(x)[0].is_cuda and torch.meshgrid(x[0], x[0], indexing="ij")[0].is_cuda
    assert torch.broadcast_tensors(x, x[0])[1].is_cuda
    assert torch.ops.aten.add(x, x).is_cuda and torch.ops.aten.add.Tensor(x, x).is_cuda
    assert torch.utils._pytree.tree_map(lambda t: t + 1, {"a": [x]})["a"][0].is_cuda
    assert torch.utils.data.default_collate([x, x]).is_cuda
    """)


def test_sparse_tensors_are_on_the_gpu_when_made_there(shim: Snippet) -> None:
    shim("""
    import warnings
    warnings.simplefilter("ignore")
    where = torch.tensor([[0, 1], [1, 0]])
    sparse = torch.sparse_coo_tensor(where, [1.0, 2.0], device="cuda")
    assert sparse.is_cuda and sparse.to_dense().is_cuda and sparse.coalesce().values().is_cuda
    assert (sparse @ torch.ones(2, 2).cuda()).tolist() == [[1, 1], [2, 2]]
    assert torch.zeros(2).to_sparse().cuda().is_cuda and not sparse.cpu().is_cuda
    """)


def test_numbers_equal_the_cpu_s_when_computed_on_handles(shim: Snippet) -> None:
    shim("""
    x = torch.randn(4, 6)
    y = x.cuda()
    for work in (
        lambda t: t @ t.t(),
        lambda t: torch.nn.functional.softmax(t, -1),
        lambda t: t[t > 0].sum(),
        lambda t: torch.einsum("ij,kj->ik", t, t),
        lambda t: torch.fft.fft(t).abs(),
        lambda t: t.view(2, 12).transpose(0, 1).contiguous(),
        lambda t: torch.nn.functional.scaled_dot_product_attention(t[None], t[None], t[None]),
        lambda t: torch.zeros_like(t).index_add_(0, t.argmax(0)[:4] % 4, t),
        lambda t: torch.stft(t.flatten(), 8, window=torch.ones(8, device=t.device),
                             return_complex=True).abs(),
    ):
        on_gpu = work(y)
        assert on_gpu.is_cuda and torch.equal(work(x), on_gpu.cpu())
    """)


def test_cpu_argument_stays_on_the_cpu_when_it_is_the_result(shim: Snippet) -> None:
    shim("""
    on_cpu, on_gpu = torch.zeros(3), torch.ones(3).cuda()
    assert on_cpu.copy_(on_gpu) is on_cpu and type(on_cpu) is torch.Tensor
    assert on_gpu.copy_(torch.zeros(3)) is on_gpu and on_gpu.is_cuda
    """)


_MIXED = """
h + c | c + h | torch.add(h, c) | h.add_(c) | torch.cat([h, c]) | torch.stack([c, h]) |
torch.where(h > 0, h, c) | torch.nn.functional.linear(h, torch.ones(4, 4)) | torch.equal(h, c) |
torch.nn.functional.embedding(torch.tensor([1]), torch.ones(3, 3).cuda()) | c.set_(h) |
torch.add(h, h, out=c) | torch.nn.Linear(4, 4)(h) | h.index_select(0, torch.tensor([1])) |
h.masked_fill(torch.tensor([True] * 4), 0.0) | torch.einsum("i,i->", h, c) |
h.scatter_(0, torch.tensor([1]), h)
"""


def test_operators_raise_when_devices_are_mixed(shim: Snippet) -> None:
    programs = {
        call.strip(): f"""
    h, c = torch.ones(4).cuda(), torch.ones(4)
    try:
        {call.strip()}
    except RuntimeError as error:
        assert "device" in str(error), error
    else:
        raise AssertionError("no error")
    """
        for call in _MIXED.split("|")
    }
    failures = failures_of(shim, programs)

    assert failures == {}, "\n".join(failures.values())


def test_operator_takes_cpu_tensors_when_cuda_does(shim: Snippet) -> None:
    shim("""
    h, c, two = torch.ones(4).cuda(), torch.ones(4), torch.tensor(2.0)
    assert (h * two).is_cuda and (two * h).is_cuda and torch.where(h > 0, h, two).is_cuda
    assert h[torch.tensor([1])].is_cuda and h[c > 0].is_cuda
    h[torch.tensor([0])] = 1.0
    h[0] = two
    h[:2] = torch.full((2,), 5.0)
    h.index_put_((torch.tensor([3]),), torch.tensor(7.0).cuda())
    assert h.tolist() == [5, 5, 1, 7]
    """)


def test_data_changes_the_device_when_assigned(shim: Snippet) -> None:
    shim("""
    x = torch.ones(2, 3).cuda()
    for made in (torch.zeros(2, 3), torch.nn.Parameter(torch.zeros(2, 3))):
        kind = type(made)
        made.data = x
        assert made.is_cuda and isinstance(made, kind) and made.data_ptr() == x.data_ptr()
        made.data = torch.zeros(2, 3)
        assert type(made) is kind
    a, b = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.ones(2).cuda())
    torch.utils.swap_tensors(a, b)
    assert a.is_cuda and not b.is_cuda
    """)


def test_user_s_subclass_stays_one_when_moved(shim: Snippet) -> None:
    shim("""
    class Image(torch.Tensor):
        pass
    image = torch.ones(2).as_subclass(Image)
    moved = image.to("cuda")
    assert moved.is_cuda and isinstance(moved, Image) and type(moved.cpu()) is Image
    """)


def test_handles_work_when_used_on_other_threads(shim: Snippet) -> None:
    shim("""
    import threading
    x, seen = torch.ones(3).cuda(), []
    def work():
        seen.append((x + 1).is_cuda and torch.zeros(2, device="cuda").is_cuda)
    threads = [threading.Thread(target=work) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert seen == [True] * 4
    """)


def test_tensor_made_of_a_gpu_tensor_stays_there_when_an_old_constructor_makes_it(
    shim: Snippet,
) -> None:
    shim("""
    from torch.autograd import Variable
    g = torch.ones(2).cuda()
    made = Variable(g, requires_grad=True)
    assert made.is_cuda and made.requires_grad and isinstance(made, Variable)
    (made * g).sum().backward()
    assert made.grad.is_cuda
    assert Variable(data=g).is_cuda and not Variable(torch.ones(2)).is_cuda
    """)


def test_parameter_class_of_a_user_keeps_the_device_when_made_of_a_tensor(shim: Snippet) -> None:
    shim("""
    class Scale(torch.nn.Parameter):
        def __new__(cls, data):
            return torch.Tensor._make_subclass(cls, data, True)

    g = torch.ones(2).cuda()
    made = Scale(g)
    assert made.is_cuda and isinstance(made, Scale) and made.requires_grad
    with torch.no_grad():
        g.add_(1)
    assert made.sum().item() == 4, "it shares the memory"
    assert not Scale(torch.ones(2)).is_cuda
    assert torch.Tensor._make_subclass(torch.nn.Parameter, g).is_cuda
    """)


def test_iteration_raises_torch_s_error_when_a_tensor_has_no_dimensions(shim: Snippet) -> None:
    shim("""
    def error(device, iterate):
        try:
            iterate(torch.tensor(1.0, device=device))
        except (TypeError, IndexError) as error:
            return type(error), str(error)

    for iterate in (iter, list, lambda x: [*x], lambda x: (lambda a, b: a)(*x)):
        assert error("cpu", iterate) and error("cuda", iterate) == error("cpu", iterate)
    """)
