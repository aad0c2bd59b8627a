"""Factories that take tensors: on the device of these or not, as torch has it for `meta`."""

from tests.kit.programs.snippets import Snippet

# Calls with a matrix m, values v, counts n, indices i and a quantised q, by the name of torch's
# schema. Those after the bar read a number, which a tensor on `meta` has not: they do not follow.
_CALLS = """
_empty_per_channel_affine_quantized: torch._empty_per_channel_affine_quantized(
    (3,), scales=v, zero_points=v, axis=0, dtype=torch.quint8)
_nested_tensor_from_tensor_list: torch.nested.nested_tensor([v, v])
    ; torch.nested.as_nested_tensor([v])
as_tensor: torch.as_tensor(v); torch.asarray(v); torch.as_tensor(v, dtype=torch.int64)
tensor: torch.tensor(v); torch.Tensor(v); torch.from_dlpack(v)
empty_like: torch.empty_like(v)
full_like: torch.full_like(v, 2.0)
ones_like: torch.ones_like(v)
zeros_like: torch.zeros_like(v)
rand_like: torch.rand_like(v)
randn_like: torch.randn_like(v)
randint_like: torch.randint_like(v, 3)
normal: torch.normal(v, v); torch.normal(v); torch.normal(0.0, v); torch.normal(v, 1.0)
new_empty: v.new_empty(2); v.new(2); v.new([1.0])
new_empty_strided: v.new_empty_strided((2,), (1,))
new_full: v.new_full((2,), 1.0)
new_ones: v.new_ones(2)
new_zeros: v.new_zeros(2); v.new_tensor([1.0])
sparse_coo_tensor: torch.sparse_coo_tensor(i, v, (3, 3)); torch.sparse_coo_tensor([[0, 1, 2]], v)
    ; torch.sparse_coo_tensor(indices=i, values=v, size=(3, 3)); torch.sparse_coo_tensor(i, v)
sparse_csr_tensor: torch.sparse_csr_tensor(n, i[0], v, (3, 3)); torch.sparse_csr_tensor(
    [0, 1, 2, 3], [2, 0, 1], v)
sparse_csc_tensor: torch.sparse_csc_tensor(n, i[0], v, (3, 3))
sparse_bsr_tensor: torch.sparse_bsr_tensor(n[:3], i[0, 1:], m.expand(2, 2, 2), (4, 4))
sparse_bsc_tensor: torch.sparse_bsc_tensor(n[:3], i[0, 1:], m.expand(2, 2, 2), (4, 4))
sparse_compressed_tensor: torch.sparse_compressed_tensor(
    n, i[0], v, (3, 3), layout=torch.sparse_csr)
complex: torch.complex(v, v); torch.polar(v, v); torch.cartesian_prod(v, v); torch.combinations(v)
quantize: torch.fake_quantize_per_tensor_affine(v, 0.1, 0, 0, 255)
|
arange: torch.arange(n[2]); torch.arange(0, n[2]); torch.arange(end=n[2])
range: torch.range(0, n[2])
linspace: torch.linspace(v[0], v[1], 3); torch.linspace(0.0, v[1], 3)
    ; torch.linspace(start=v[0], end=v[1], steps=3)
logspace: torch.logspace(v[0], v[1], 3); torch.logspace(v[0], 1.0, 3)
full: torch.full((2,), v[0]); torch.full((n[2], 1), 2.0)
zeros: torch.zeros(n[2], 2); torch.zeros((n[2], 2)); torch.zeros([n[1], n[2]])
ones: torch.ones(n[2])
empty: torch.empty((n[2],))
rand: torch.rand(n[2], 2)
randn: torch.randn((n[2], 2))
randint: torch.randint(0, n[3], (2,))
randperm: torch.randperm(n[2])
eye: torch.eye(n[2])
scalar_tensor: torch.scalar_tensor(v[0])
list: torch.tensor([v[0], v[1]]); torch.as_tensor([v[0]]); torch.asarray([v[0], 1.0])
"""
# Of torch's own table: they take no tensor, or no program calls them, or they name what they do.
_OTHERS = """
Generator _assert_tensor_metadata _cudnn_init_dropout_state _efficientzerotensor
_empty_affine_quantized _make_dep_token _pin_memory _resize_output_ bartlett_window blackman_window
empty_permuted empty_quantized empty_strided fft_fftfreq fft_rfftfreq from_file hamming_window
hann_window is_pinned kaiser_window pin_memory to tril_indices triu_indices
"""


def _parsed(text: str) -> dict[str, list[str]]:
    lines = text.strip().replace("\n    ", " ").splitlines()
    pairs = (line.partition(": ") for line in lines)
    return {name: [call.strip() for call in calls.split(";")] for name, _, calls in pairs}


FOLLOWING, FREE = map(_parsed, _CALLS.split("|"))
ARGUMENTS = """
import torch, warnings
warnings.simplefilter("ignore")

def arguments(device):
    return dict(
        v=torch.tensor([3.0, 4.0, 5.0]).to(device), m=torch.ones(1, 2, 2).to(device),
        n=torch.tensor([0, 1, 2, 3]).to(device), i=torch.tensor([[0, 1, 2], [2, 0, 1]]).to(device))
"""


def test_factory_follows_the_tensors_it_is_given_where_torch_s_own_does(shim: Snippet) -> None:
    shim(f"""{ARGUMENTS}
wrong, told = {{}}, 0
on_gpu, elsewhere = arguments("cuda"), arguments("meta")
for call in (call for calls in {FOLLOWING!r}.values() for call in calls):
    try:
        assert eval(call, globals(), elsewhere).device.type == "meta", call
        told += 1
    except (BufferError, NotImplementedError, RuntimeError, ValueError):
        pass  # `meta` lacks the operator
    made = eval(call, globals(), on_gpu)
    if made.device.type != "cuda" or not made.is_cuda:
        wrong[call] = made.device
assert told > 30, told
for call in (call for calls in {FREE!r}.values() for call in calls):
    made = eval(call, globals(), on_gpu)
    random = any(name in call for name in ("rand", "empty"))
    same = random or torch.equal(made, eval(call, globals(), arguments("cpu")))
    if made.device.type != "cpu" or not same:
        wrong[call] = made.device
assert not wrong, wrong
""")


def test_every_factory_of_torch_s_table_is_tried_with_tensors(shim: Snippet) -> None:
    tried = sorted({*FOLLOWING, *FREE, *_OTHERS.split()})
    shim(f"""
import torch
factories = {{
    schema.name.removeprefix("aten::")
    for schema in torch._C._jit_get_all_schemas()
    if schema.name.startswith("aten::")
    and any(argument.name == "device" for argument in schema.arguments)
}}
spaces = (torch, torch.Tensor, torch.fft)
public = {{
    name for name in factories
    if any(hasattr(space, name.removeprefix("fft_")) for space in spaces)
}}
assert public <= set({tried!r}), public - set({tried!r})
""")


def test_sparse_tensor_computes_with_gpu_tensors_when_made_of_some(shim: Snippet) -> None:
    shim(f"""{ARGUMENTS}
def products(device):
    given = arguments(device)
    i, v, n, x = given["i"], given["v"], given["n"], torch.arange(9.0).view(3, 3).to(device)
    v = v.clone().requires_grad_()
    coo, csr = torch.sparse_coo_tensor(i, v, (3, 3)), torch.sparse_csr_tensor(n, i[0], v, (3, 3))
    assert coo.device.type == csr.device.type == coo.coalesce().indices().device.type == device
    answers = [coo @ x, csr @ x, torch.sparse.mm(coo, x), torch.sparse.addmm(x, coo, x)]
    answers[0].sum().backward()
    return [answer.detach().cpu() for answer in answers] + [v.grad.cpu()]

assert all(map(torch.equal, products("cuda"), products("cpu")))
""")


def test_sparse_tensor_is_refused_when_its_parts_are_on_two_devices(shim: Snippet) -> None:
    shim(f"""{ARGUMENTS}
here, there = arguments("cpu"), arguments("cuda")
for call in (
    lambda: torch.sparse_coo_tensor(here["i"], there["v"], (3, 3)),
    lambda: torch.sparse_coo_tensor(there["i"], here["v"], (3, 3)),
    lambda: torch.sparse_coo_tensor(there["i"], [1.0, 2.0, 3.0], (3, 3)),
    lambda: torch.sparse_csr_tensor(here["n"], there["i"][0], there["v"], (3, 3)),
):
    try:
        call()
    except RuntimeError as error:
        assert "must match device of values" in str(error), error
    else:
        raise AssertionError("it was made")
made = torch.sparse_coo_tensor(here["i"], there["v"], (3, 3), device="cuda")
assert made.is_cuda and made.indices is not None
assert torch.sparse_coo_tensor(there["i"], there["v"], (3, 3), device="cpu").is_cpu
""")


def test_factory_of_gpu_tensors_obeys_the_device_around_it_where_torch_s_own_does(
    shim: Snippet,
) -> None:
    shim(f"""{ARGUMENTS}
wrong, told = {{}}, 0

def device_of(call, given, around):
    with torch.device(around):
        return eval(call, globals(), given).device.type

for call in (call for calls in {[*FOLLOWING.values(), *FREE.values()]!r} for call in calls):
    try:
        obeys = device_of(call, arguments("cpu"), "meta") == "meta"
    except (NotImplementedError, RuntimeError):
        obeys = True  # it was about to move to `meta` what it reads
    told += obeys
    if obeys and device_of(call, arguments("cuda"), "cpu") != "cpu":
        wrong[call] = "under cpu"
    if obeys != (device_of(call, arguments("cpu"), "cuda") == "cuda"):
        wrong[call] = "under cuda"
    if not obeys and call in {[call for calls in FOLLOWING.values() for call in calls]!r}:
        if device_of(call, arguments("cuda"), "cpu") != "cuda":
            wrong[call] = "under cpu, though torch's own follows its tensors"
assert told > 30 and not wrong, (told, wrong)
given = arguments("cuda")
torch.set_default_device("cpu")
assert torch.as_tensor(given["v"]).is_cpu and torch.sparse_coo_tensor(given["i"], given["v"]).is_cpu
assert torch.as_tensor(given["v"], device="cuda").is_cuda
assert torch.tensor(given["v"], device="meta").is_meta
""")


def test_function_mode_sees_the_public_factory_before_a_device_is_chosen(shim: Snippet) -> None:
    shim(f"""{ARGUMENTS}
from torch.overrides import TorchFunctionMode

class Noting(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        seen.append((function, (kwargs or {{}}).get("device")))
        return function(*args, **kwargs or {{}})

given = arguments("cuda")
for around, where in (("cuda", "cuda"), ("cpu", "cpu"), ("meta", "meta")):
    for function, *args in (
        (torch.zeros, 2),
        (torch.tensor, given["v"]),
        (torch.sparse_coo_tensor, given["i"], given["v"], (3, 3)),
    ):
        seen = []
        with torch.device(around), Noting():
            made = function(*args)
        assert seen[0] == (function, None) and made.device.type == where, (around, function, seen)
with torch.device("cuda"):
    assert torch.range(0, 3).is_cpu  # as torch's own, which goes to no mode
""")
