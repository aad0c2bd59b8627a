"""Tensor classes of other libraries, written as those libraries write them, on the GPU."""

from tests.kit.programs.snippets import Snippet

# A quantised weight that holds tensors and dequantises in `linear`.
_QUANTISED = """
import warnings
warnings.simplefilter("ignore")
aten = torch.ops.aten
class Quantised(torch.Tensor):
    @staticmethod
    def __new__(cls, numbers, scale, shape):
        kind, device = scale.dtype, numbers.device
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=kind, device=device)
    def __init__(self, numbers, scale, shape):
        self.numbers, self.scale = numbers, scale
    def __tensor_flatten__(self):
        return ["numbers", "scale"], [self.shape]
    @classmethod
    def __tensor_unflatten__(cls, parts, context, *sizes):
        return cls(parts["numbers"], parts["scale"], context[0])
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.nn.functional.linear:
            x, weight, *bias = args
            assert all(issubclass(cls, kind) for kind in types), types
            wide = weight.numbers.to(weight.scale.dtype) * weight.scale
            return torch.nn.functional.linear(x, wide, *bias)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))
    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        first = args[0]
        if func in (aten.detach.default, aten.clone.default, aten.alias.default):
            return cls(func(first.numbers), func(first.scale), first.shape)
        raise NotImplementedError(str(func))
class Quantised8(Quantised):
    "Inherits its operators."
def quantised(weight):
    scale = weight.abs().amax(1, keepdim=True) / 127
    return Quantised8((weight / scale).round().to(torch.int8), scale, weight.shape)
"""


def test_quantised_layer_computes_on_the_gpu_whenever_it_is_moved(shim: Snippet) -> None:
    shim(f"""{_QUANTISED}
torch.manual_seed(0)
x = torch.randn(2, 4)
def layer(before, after):
    made = before(torch.nn.Linear(4, 3))
    with torch.no_grad():
        for value in made.parameters():
            value.copy_(torch.arange(float(value.numel())).reshape(value.shape) / 7)
    weight = quantised(made.weight.detach())
    made.weight = torch.nn.Parameter(weight, requires_grad=False)
    return after(made)
native = layer(lambda m: m, lambda m: m)(x)
for before, after in ((torch.nn.Module.cuda, lambda m: m), (lambda m: m, torch.nn.Module.cuda)):
    moved = layer(before, after)
    assert isinstance(moved.weight, Quantised) and moved.weight.is_cuda
    assert moved.weight.numbers.is_cuda and moved.weight.device == torch.device("cuda", 0)
    found = moved(x.cuda())
    assert found.is_cuda
    torch.testing.assert_close(found.cpu(), native)
back = moved.cpu()
assert back.weight.numbers.is_cpu and not back.weight.is_cuda
torch.testing.assert_close(back(x), native)
""")


def test_wrapper_takes_part_in_a_backward_pass_without_asking_the_driver(shim: Snippet) -> None:
    shim(f"""{_QUANTISED}
class Quantise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):
        return quantised(weight)
    @staticmethod
    def backward(ctx, gradient):
        return gradient
weight = torch.ones(3, 4).cuda().requires_grad_()
made = Quantise.apply(weight)
assert isinstance(made, Quantised) and made.is_cuda and made.requires_grad
assert torch.nn.functional.linear(torch.ones(2, 4).cuda(), made).is_cuda
""")


def test_class_with_a_function_of_its_own_decides_when_it_stands_beside_a_handle(
    shim: Snippet,
) -> None:
    shim("""
    from torch_shim.tensors import write_epochs
    class Named(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if not all(issubclass(cls, kind) for kind in types):
                return NotImplemented
            return super().__torch_function__(func, types, args, kwargs or {})
    g = torch.ones(3).cuda()
    scalar = torch.tensor(2.0).as_subclass(Named)
    for made in (g * scalar, scalar * g, torch.add(g, scalar)):
        assert isinstance(made, Named) and made.is_cuda, (type(made), made.device)
    mark = write_epochs.marked(g)
    before = mark.epoch
    g.mul_(scalar)
    assert g.cpu().tolist() == [2.0] * 3 and mark.epoch != before
    """)


def test_class_is_on_the_gpu_when_a_handle_takes_it(shim: Snippet) -> None:
    shim("""
    class Packed(torch.Tensor):
        pass
    g = torch.arange(3.0).cuda()
    for packed in (g.as_subclass(Packed), torch.arange(3.0).as_subclass(Packed).cuda()):
        assert isinstance(packed, Packed) and packed.is_cuda and packed.device.type == "cuda"
        assert (packed + g).is_cuda and packed.cpu().is_cpu
        assert isinstance(packed.cpu(), Packed) and packed.cpu().tolist() == [0, 1, 2]
    """)


def test_masked_tensor_keeps_the_gpu_when_it_is_made_of_handles(shim: Snippet) -> None:
    shim("""
    import warnings
    warnings.simplefilter("ignore")
    g = torch.tensor([1.0, -2.0, 3.0]).cuda()
    masked = torch.masked.masked_tensor(g, g > 0)
    for made in (masked, masked + masked, masked * 2):
        assert made.is_cuda and made.get_data().is_cuda
    assert (masked + masked).to_tensor(0.0).cpu().tolist() == [2.0, 0.0, 6.0]
    assert masked.sum().get_data().item() == 4.0
    """)


def test_class_that_does_not_say_what_it_holds_is_refused_when_it_is_moved(shim: Snippet) -> None:
    shim("""
    import warnings
    warnings.simplefilter("ignore")
    from torch_shim.errors import UnsupportedCall
    masked = torch.masked.masked_tensor(torch.ones(2), torch.tensor([True, False]))
    try:
        masked.cuda()
    except UnsupportedCall as error:
        assert "MaskedTensor" in str(error) and "plain torch.Tensor" in str(error)
    else:
        raise AssertionError
    """)


def test_distributed_tensor_is_refused_when_it_is_on_the_gpu(shim: Snippet) -> None:
    shim("""
    import warnings
    warnings.simplefilter("ignore")
    import torch.distributed as dist
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch_shim.errors import UnsupportedCall
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    whole = torch.arange(8.0).reshape(4, 2)
    on_cpu = distribute_tensor(whole, dist.init_device_mesh("cpu", (1,)), [Shard(0)])
    assert (on_cpu + on_cpu).full_tensor().equal(whole * 2)
    try:
        distribute_tensor(whole.cuda(), dist.init_device_mesh("cuda", (1,)), [Shard(0)])
    except UnsupportedCall as error:
        assert "DTensor" in str(error) and "plain tensors" in str(error)
    else:
        raise AssertionError
    """)
