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


def test_results_are_plain_tensors_when_a_class_takes_no_part_in_operators(
    shim: Snippet,
) -> None:
    shim("""
    class Free(torch.Tensor):
        __torch_function__ = torch._C._disabled_torch_function_impl
    class Weight(torch.nn.Parameter):
        pass
    free = torch.arange(2.0).cuda().as_subclass(Free)
    weight = Weight(torch.ones(2).cuda())
    for given, kind in ((free, Free), (weight, Weight)):
        assert isinstance(given, kind) and given.is_cuda
        for made in (given + 1, given[0], given.sum(), given.clone(), given.detach(), 1 + given):
            assert not isinstance(made, kind) and made.is_cuda, type(made)
    free += weight.detach()
    assert isinstance(free, Free) and free.cpu().tolist() == [1.0, 2.0]
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


# A class that keeps `torch.Tensor`'s rules, one that has its own, one with methods of its own.
_PROGRAMS = """
import copy, io, pickle, sys
class Tagged(torch.Tensor):
    def __repr__(self, **_):
        return "Tagged()"
class Named(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        assert all(issubclass(cls, kind) for kind in types), types
        made = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(made, Named):
            made.tag = next((a.tag for a in args if isinstance(a, Named)), None)
        return made
class Weight(torch.nn.Parameter):
    pass
def named(value):
    made = value.as_subclass(Named)
    made.tag = "n"
    return made
for kind in (Tagged, Named, Weight):
    setattr(sys.modules["__main__"], kind.__name__, kind)
    kind.__module__ = "__main__"
"""


def test_program_s_class_stays_through_operators(shim: Snippet) -> None:
    shim(f"""{_PROGRAMS}
def kinds(device):
    plain = torch.ones(2, 3, device=device)
    found = {{}}
    for x in (plain.as_subclass(Tagged), named(plain)):
        made = dict(
            times=x * 2, other=plain + x, row=x[0], sum=x.sum(), cat=torch.cat([plain, x]),
            split=x.split(1)[0], largest=x.max(0)[0], turned=x.T, soft=torch.softmax(x, 0),
            written=x.clone().add_(1),
            moved=x.cpu().to(device), wide=x.double(),
            row0=next(iter(x)), detached=x.detach(), given=type(x)(plain), new=x.new_zeros(2),
            zeros=torch.zeros_like(x),
            plain=x.as_subclass(torch.Tensor), here=x.cpu(), shared=copy.copy(x))
        for name, value in made.items():
            assert value.device.type == ("cpu" if name == "here" else device), name
            kind = next((k for k in (Tagged, Named) if type(value) == k), None)
            found[type(x).__name__, name] = kind, getattr(value, "tag", None)
        assert isinstance(x, (Tagged, Named)) and {{Tagged: 1, Named: 2}}[type(x)]
        assert repr(plain.as_subclass(Tagged)) == "Tagged()" and x.sum().item() == 6
        kept = pickle.loads(pickle.dumps(x))
        assert isinstance(kept, (Tagged, Named)) and kept.device.type == device
        z = x.detach().clone().requires_grad_()
        (z * z).sum().backward()
        assert z.grad.device.type == device and z.grad.sum().item() == 12
    return found
on_gpu, plain = kinds("cuda"), kinds("cpu")
wrong = {{name: (on_gpu[name], plain[name]) for name in plain if on_gpu[name] != plain[name]}}
assert not wrong, wrong
""")


def test_tensor_keeps_its_class_when_an_operator_with_a_program_s_class_writes_to_it(
    shim: Snippet,
) -> None:
    shim(f"""{_PROGRAMS}
x = torch.ones(2, device="cuda").as_subclass(Tagged)
plain, out, copied = (torch.ones(2, device="cuda") for _ in range(3))
layer = torch.nn.BatchNorm1d(2).cuda()
plain.add_(x)
torch.add(plain, x, out=out)
copied.copy_(x)
layer.running_mean.mul_(0.9).add_(x)
for written in (plain, out, copied, layer.running_mean):
    assert type(written) != Tagged and type(written * 2) != Tagged, written
assert plain.tolist() == [2, 2] and out.tolist() == [3, 3]
""")


def test_tensors_keep_their_classes_when_they_are_given_in_lists(shim: Snippet) -> None:
    shim(f"""{_PROGRAMS}
class Unwrapping(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {{}}))
plain = torch.ones(2, device="cuda")
gpu, on_cpu, tagged = type(plain), torch.ones(2), plain.clone().as_subclass(Tagged)
added = [plain.clone()]
torch._foreach_add_(added, [tagged])
largest, index = torch.zeros(1, device="cuda")[0], torch.zeros(1, device="cuda").long()[0]
torch.max(tagged, 0, out=(largest, index))
assert torch.atleast_1d([plain, tagged])[1].tolist() == [1, 1]
for tensor in (*added, largest, index, plain):
    assert type(tensor) is gpu, tensor
assert added[0].tolist() == [2, 2] and largest == 1 and type(tagged) == Tagged
torch.atleast_1d([on_cpu, plain.clone().as_subclass(Unwrapping)])
assert type(on_cpu) is torch.Tensor and on_cpu.is_cpu
""")


def test_class_with_slots_computes_though_results_are_not_of_it(shim: Snippet) -> None:
    shim("""
class Slotted(torch.Tensor):
    __slots__ = ("note",)
x = torch.ones(2, device="cuda").as_subclass(Slotted)
assert (x * 2).tolist() == [2, 2] and (x + x).device.type == "cuda"
""")


def test_classes_are_found_by_all_threads_when_several_derive_them_at_once(shim: Snippet) -> None:
    shim("""
import sys, threading
sys.setswitchinterval(1e-6)
plain, wrong = torch.ones(2, device="cuda"), []
def compute(x):
    try:
        x * 2
    except Exception as error:
        wrong.append(error)
for number in range(50):
    kind = type(f"T{number}", (torch.Tensor,), {})
    threads = [
        threading.Thread(target=lambda: compute(plain.as_subclass(kind))) for _ in range(4)
    ]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
assert not wrong, wrong[:1]
""")


def test_program_s_class_meets_others_as_beside_a_tensor_of_torch_s(shim: Snippet) -> None:
    shim(f"""{_PROGRAMS}
plain = torch.ones(2, device="cuda")
try:
    plain.as_subclass(Tagged) + torch.ones(2)
except RuntimeError as error:
    assert "same device" in str(error), error
else:
    raise AssertionError("it mixed devices")
weight = Weight(plain)
assert type(weight) == Weight and weight.is_cuda and isinstance(weight, torch.nn.Parameter)
assert type(weight * 2) is type(plain)
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = Weight(torch.ones(2))
moved = Model().cuda()
assert [type(value) for value in moved.parameters()] == [Weight] and moved.weight.is_cuda
""")


def test_program_s_class_decides_when_a_parameter_comes_first(shim: Snippet) -> None:
    shim("""
class Tagged(torch.Tensor):
    pass
class Derived(Tagged):
    pass
class Metadata(torch.Tensor):  # as PyTorch's documents extend it
    @staticmethod
    def __new__(cls, data, metadata):
        made = torch.Tensor.as_subclass(data, cls)
        made.metadata = metadata
        return made
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        asked.append((cls.__name__, [kind.__name__ for kind in types]))
        metadata = [a.metadata for a in args if hasattr(a, "metadata")]
        made = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(made, Metadata):
            made.metadata = next(iter(metadata), None)  # of a list's tensors none
        return made
class Weight(torch.nn.Parameter):
    pass
class Deciding(torch.nn.Parameter):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        asked.append((cls.__name__, [kind.__name__ for kind in types]))
        return super(torch.nn.Parameter, cls).__torch_function__(func, types, args, kwargs or {})
asked = []
def outcome(compute):
    asked.clear()
    try:
        made = compute()
    except TypeError as error:
        return str(error).partition(";")[0], list(asked)
    return type(made).__name__, getattr(made, "metadata", None), list(asked)
def outcomes(device):
    plain = torch.ones(2, device=device)
    values = dict(
        plain=plain, w=torch.nn.Parameter(plain), weight=Weight(plain), deciding=Deciding(plain),
        tagged=plain.as_subclass(Tagged), derived=plain.as_subclass(Derived),
        metadata=Metadata(plain, "m"))
    found = {}
    for first, x in values.items():
        for second, y in values.items():
            found[first, second] = outcome(lambda: x * y)
            found[first, second, "sum"] = outcome(lambda: (x * y).sum())
            found[first, second, "cat"] = outcome(lambda: torch.cat([plain, x, y]))
    assert found["w", "tagged"][0] == found["tagged", "weight"][0] == "Tagged"
    assert found["w", "metadata", "sum"][:2] == ("Metadata", "m")
    return found
on_gpu, plain = outcomes("cuda"), outcomes("cpu")
wrong = {name: (on_gpu[name], plain[name]) for name in plain if on_gpu[name] != plain[name]}
assert not wrong, wrong
""")


def test_program_s_class_answers_for_its_shape_and_type(shim: Snippet) -> None:
    shim("""
class Counted(torch.Tensor):
    @property
    def shape(self):
        return "its own"
    @property
    def dtype(self):
        return super().dtype, "its own"
    @property
    def ndim(self):
        return -1
class Asked(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        asked.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})
asked = []
def facts(device):
    counted = torch.ones(2, 3, device=device).as_subclass(Counted)
    assert (counted * 2).shape == "its own"
    x = torch.ones(2, 3, device=device).as_subclass(Asked)
    asked.clear()
    found = (x.shape, x.dtype, x.ndim, x.size(), x.size(1), x.dim(), x.numel(), x.stride(),
        x.is_contiguous(), x.is_floating_point())
    return counted.shape, counted.dtype, counted.ndim, found, list(asked)
assert facts("cuda") == facts("cpu"), (facts("cuda"), facts("cpu"))
assert len(asked) == 10
""")


def test_model_answers_in_the_classes_that_operators_give(tracing_shim: Snippet) -> None:
    tracing_shim("""
import collections, torch
class Tagged(torch.Tensor):
    pass
class Derived(Tagged):
    pass
Answer = collections.namedtuple("Answer", "first second")
class Model(torch.nn.Module):
    def __init__(self, compute):
        super().__init__()
        self.layer, self.compute = torch.nn.Linear(2, 2), compute
        self.register_buffer("kept", torch.zeros(2))
        self.register_buffer("tagged", torch.zeros(2).as_subclass(Tagged))
    def forward(self, *args):
        return self.compute(self, *args)
computations = dict(
    computed=lambda m, x, y, p: {
        "map": {"first": m.layer(x), "both": x + y, "plain": m.layer(p) * p},
        "tuple": (Answer(m.layer(x), [m.layer(y)]), x.split(1), torch.zeros(x.shape)),
        "given": (p, y, m.kept, m.answers, m.layer.weight, m.tagged),
        "buffer": p * m.tagged},
    written=lambda m, x, y, p: (p.add_(x), x.mul_(2), m.layer(p)),
    broken=lambda m, x, y, p: (
        torch._dynamo.graph_break(), m.layer(x) + y, m.layer(x).as_subclass(torch.Tensor))[1:])
def leaves(device, compute):
    model, plain = Model(compute).to(device), torch.ones(3, 2, device=device)
    model.answers = [model.kept]
    x, y, p = (plain.clone().as_subclass(kind) for kind in (Tagged, Derived, torch.Tensor))
    own = {id(t): name for name, t in dict(x=x, y=y, p=p, kept=model.kept, tagged=model.tagged,
        weight=model.layer.weight, answers=model.answers).items()}
    def described(value):
        if isinstance(value, torch.Tensor):
            kind = next((k.__name__ for k in (Derived, Tagged) if type(value) == k), "plain")
            return kind, own.get(id(value))
        if isinstance(value, dict):
            return {name: described(item) for name, item in value.items()}
        return type(value), own.get(id(value)), [described(item) for item in value]
    with torch.no_grad():
        return [described(model(x, y, p)) for _ in range(2)]
for name, compute in computations.items():
    on_gpu, plain = leaves("cuda", compute), leaves("cpu", compute)
    assert on_gpu == plain, (name, on_gpu, plain)
""")


def test_torchvision_s_transforms_find_their_classes(shim: Snippet) -> None:
    shim("""
from torchvision import tv_tensors
from torchvision.transforms import v2
torch.manual_seed(0)
pixels = torch.randint(0, 255, (3, 8, 8), dtype=torch.uint8)
def sample(device):
    return {
        "image": tv_tensors.Image(pixels).to(device),
        "made": tv_tensors.Image(pixels, device=device),
        "mask": tv_tensors.Mask(torch.ones(8, 8, dtype=torch.uint8)).to(device),
        "boxes": tv_tensors.BoundingBoxes(
            torch.tensor([[1.0, 1, 4, 4]]), format="XYXY", canvas_size=(8, 8)).to(device),
        "plain": torch.ones(3, 8, 8, device=device),
        "video": tv_tensors.Video(pixels[None]).to(device)}
by_class = {tv_tensors.Image: 7, tv_tensors.Mask: 2, "others": 0}
transforms = [
    v2.ToDtype({tv_tensors.Image: torch.float32, tv_tensors.Video: torch.float32,
        tv_tensors.Mask: torch.int64, "others": None}, scale=True),
    v2.RandomHorizontalFlip(1.0), v2.CenterCrop(4), v2.Pad(1, fill=by_class), v2.RandomRotation(90),
    v2.RandomZoomOut(p=1.0, fill=by_class), v2.ConvertBoundingBoxFormat("CXCYWH"),
    v2.ClampBoundingBoxes(), v2.RandomIoUCrop(), v2.ToPureTensor(), v2.RandomAffine(10),
    v2.Lambda(lambda x: x * 2, tv_tensors.Image)]
for transform in transforms:
    outcomes = []
    for device in ("cuda", "cpu"):
        torch.manual_seed(1)
        made = transform(sample(device))
        assert all(value.device.type == device for value in made.values()), transform
        outcomes.append([
            (type(value).__name__, value.dtype, value.shape, value.cpu().tolist())
            for value in made.values()])
    assert outcomes[0] == outcomes[1], transform
""")
