"""Uses the GPU by the older or rarer names that tutorials still have: SPELLING."""

import sys
import warnings

import torch
import torch.nn.functional as F
from torch import nn

path, spelling = sys.argv[1], sys.argv[2]
on_gpu = torch.cuda.is_available()
device = torch.device("cuda:0" if on_gpu else "cpu")
torch.manual_seed(0)
warnings.simplefilter("ignore")
x = torch.randn(4, 8)
model = nn.Linear(8, 3)
results = {}


def note(name, value):
    results[name] = value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


def legacy_types():
    kind = torch.cuda.FloatTensor if on_gpu else torch.FloatTensor
    long_kind = torch.cuda.LongTensor if on_gpu else torch.LongTensor
    made = kind([[1.0, 2.0], [3.0, 4.0]])
    note("made", made)
    note("sized", kind(2, 3).fill_(4))
    note("index", made[long_kind([1, 0])])
    note("typed", x.type(kind) @ model.weight.type(kind).t())
    assert isinstance(made, kind)
    assert made.type() == ("torch.cuda.FloatTensor" if on_gpu else "torch.FloatTensor")
    note("half", made.type(torch.float16).float())


def default_tensor_type():
    if on_gpu:
        torch.set_default_tensor_type("torch.cuda.FloatTensor")
    layer = nn.Linear(8, 3)
    assert layer.weight.is_cuda == on_gpu
    note("made", torch.ones(2, 8) @ layer.weight.new_ones(8, 3))
    note("shape", tuple(layer(torch.zeros(2, 8)).shape))
    note("tensor", torch.tensor([1.0, 2.0]) * 2)


def default_device():
    torch.set_default_device(device)
    layer = nn.Linear(8, 3)
    assert layer.weight.device == device
    note("zeros", torch.zeros(3) + torch.arange(3))
    torch.set_default_device(None)
    assert torch.zeros(1).device.type == "cpu"
    with torch.device(device):
        inside = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).eval()
        given = torch.linspace(0, 1, 16).reshape(2, 8)
        assert given.device == device
    for parameter in inside.parameters():
        nn.init.constant_(parameter, 0.1)
    note("inside", inside(given))


def new_tensors():
    given = x.to(device)
    note("new", given.new(2, 3).zero_())
    note("new_tensor", given.new_tensor([1, 2, 3]))
    note("new_full", given.new_full((2,), 7))
    note("like", torch.full_like(given, 3) + torch.zeros_like(given))
    note("empty", torch.empty_like(given).copy_(x))
    note("as_tensor", torch.as_tensor([1.5, 2.5], device=device))
    note("array", torch.as_tensor(x.numpy(), device=device))
    note("to_other", x.to(given))
    note("type_as", torch.arange(3).type_as(given))
    assert given.new_zeros(1).device == device


def numbered_devices():
    moved = model.cuda(0) if on_gpu else model
    with torch.cuda.device(0 if on_gpu else -1):
        note("inside", moved(x.cuda() if on_gpu else x))
    note("named", moved(x.to(device, non_blocking=True)))
    if on_gpu:
        assert torch.cuda.current_device() == 0
        assert torch.cuda.device_count() >= 1
        assert torch.cuda.get_device_name(0)
        assert torch.cuda.get_device_capability()[0] >= 5
        assert x.cuda().get_device() == 0
        with torch.cuda.device_of(moved.weight):
            assert moved.weight.is_cuda


def variables():
    given = torch.autograd.Variable(x.to(device), requires_grad=True)
    model.to(device)(given).sum().backward()
    note("gradient", given.grad.data)
    note("data", given.data + 1)


def backends():
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.deterministic = False
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("high")
    net = nn.Conv2d(3, 4, 3).to(device).eval()
    with torch.backends.cudnn.flags(enabled=True, benchmark=False):
        note("flags", net(torch.ones(1, 3, 8, 8).to(device)))
    torch.use_deterministic_algorithms(True, warn_only=True)
    note("deterministic", net(torch.ones(1, 3, 8, 8).to(device)))
    torch.use_deterministic_algorithms(False)


def attention_kernels():
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q = torch.randn(2, 4, 8, 16).to(device)
    with sdpa_kernel(SDPBackend.MATH):
        note("math", F.scaled_dot_product_attention(q, q, q, is_causal=True))
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION]):
        layer = nn.TransformerEncoderLayer(16, 4, batch_first=True).to(device).eval()
        note("layer", layer(torch.randn(2, 5, 16).to(device)))
    note("scaled", F.scaled_dot_product_attention(q, q, q, scale=0.3))


def memory_statistics():
    given = torch.zeros(1000, 1000, device=device)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.memory_allocated() >= 4_000_000
        assert torch.cuda.max_memory_allocated() >= torch.cuda.memory_allocated()
        assert torch.cuda.memory_reserved() >= 0
        free, total = torch.cuda.mem_get_info()
        assert 0 < free <= total
        assert isinstance(torch.cuda.memory_summary(), str)
        assert "allocated_bytes.all.current" in torch.cuda.memory_stats()
        torch.cuda.empty_cache()
        torch.cuda.synchronize(device)
        torch.cuda.ipc_collect()
        assert torch.cuda.get_device_properties(0).total_memory > 0
        assert torch.cuda.utilization is not None
    note("sum", given.sum())


def events_and_streams():
    total = torch.zeros(4, 3, device=device)
    moved, given = model.to(device).eval(), x.to(device)
    if on_gpu:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        side = torch.cuda.Stream(priority=-1)
        side.wait_stream(torch.cuda.current_stream())
        start.record()
        with torch.cuda.stream(side):
            total += moved(given)
        torch.cuda.current_stream().wait_stream(side)
        end.record()
        end.synchronize()
        assert start.elapsed_time(end) >= 0
        assert side.query() in {True, False}
        torch.cuda.nvtx.range_push("work")
        torch.cuda.nvtx.range_pop()
        with torch.cuda.nvtx.range("more"):
            total.record_stream(side)
    else:
        total += moved(given)
    note("total", total)


def mixed_precision():
    moved, given = model.to(device), x.to(device)
    kind = device.type
    with torch.autocast(kind, dtype=torch.bfloat16):
        found = moved(given)
        with torch.autocast(kind, enabled=False):
            note("disabled", moved(given))
    assert found.dtype is torch.bfloat16
    note("cast", found)

    @torch.autocast(kind, dtype=torch.bfloat16)
    def decorated(value):
        return moved(value)

    note("decorated", decorated(given))
    with torch.amp.autocast(device_type=kind, dtype=torch.bfloat16, cache_enabled=False):
        note("uncached", torch.mm(given, given.t()))
    scaler = torch.amp.GradScaler(kind, enabled=on_gpu)
    optimizer = torch.optim.SGD(moved.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.mse_loss(moved(given), torch.zeros(4, 3, device=device))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(moved.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    note("loss", loss)


def pinned_copies():
    pinned = x.pin_memory() if on_gpu else x
    assert not on_gpu or pinned.is_pinned()
    moved = pinned.to(device, non_blocking=True)
    back = torch.empty(4, 8, pin_memory=on_gpu)
    back.copy_(moved, non_blocking=True)
    if on_gpu:
        torch.cuda.current_stream().synchronize()
    note("back", back)


def generators():
    generator = torch.Generator(device=device).manual_seed(7)
    note("normal", torch.randn(3, generator=generator, device=device))
    state = generator.get_state()
    first = torch.randint(0, 9, (5,), generator=generator, device=device)
    generator.set_state(state)
    assert torch.equal(first, torch.randint(0, 9, (5,), generator=generator, device=device))
    torch.cuda.manual_seed_all(5)
    torch.manual_seed(5)
    a = torch.rand(3, device=device)
    with torch.random.fork_rng(devices=[0] if on_gpu else []):
        torch.manual_seed(1)
        torch.rand(100, device=device)
    note("after", torch.rand(3, device=device) + a)
    note("permutation", torch.randperm(6, device=device, generator=generator))
    note("uniform", torch.empty(3, device=device).uniform_(1, 2, generator=generator))
    assert generator.initial_seed() == 7


def answers_of_type():
    given = x.to(device)
    assert given.is_cuda == on_gpu
    assert repr(given.sum().round()).endswith("device='cuda:0')") == on_gpu
    assert str(given.device) == str(device)
    assert isinstance(given, torch.Tensor)
    assert torch.is_tensor(given)
    assert type(given) is torch.Tensor or on_gpu
    assert isinstance(nn.Parameter(given), nn.Parameter)
    assert given.storage().size() == 32
    assert given.untyped_storage().nbytes() == 128
    assert given.data_ptr() != 0
    note("list", given[0, :2].tolist())
    note("item", given.max().item())
    note("bool", bool((given > -100).all()))
    note("index", [10, 20, 30][given.argmax() % 3])
    note("format", f"{given.mean():.3f} {given.std().item():.2e}")
    note("numpy", torch.from_numpy(given.cpu().numpy() * 2))
    note("iterated", torch.stack(list(given)))
    assert given[0] in given
    note("hash", len({given, given}))
    note("length", len(given))


def detected_anomaly():
    with torch.autograd.set_detect_anomaly(True):
        given = x.to(device).requires_grad_()
        (model.to(device)(given) ** 2).mean().backward()
    note("gradient", given.grad)


def data_parallel():
    wrapped = nn.DataParallel(model) if on_gpu else model
    note("answer", wrapped.to(device)(x.to(device)))
    inner = getattr(wrapped, "module", wrapped)
    note("weight", inner.weight)


def errors():
    given = x.to(device)
    for name, wrong in {
        "shape": lambda: given @ given,
        "index": lambda: given[9],
        "view": lambda: given.view(5, 5),
        "dtype": lambda: model.to(device)(given.long()),
        "broadcast": lambda: given + torch.ones(3, device=device),
        "layer": lambda: model.to(device)(torch.ones(2, 5, device=device)),
    }.items():
        try:
            wrong()
        except (RuntimeError, IndexError) as error:
            note(name, type(error).__name__)
    assert len(results) == 6


globals()[spelling]()
torch.save(results, path)
