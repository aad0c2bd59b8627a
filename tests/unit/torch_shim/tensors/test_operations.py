"""Everyday operations on handles: they run, and what they make is where it should be."""

from tests.kit.programs.snippets import Snippet, calls, failures_of

_SETUP = """
import copy
F = torch.nn.functional
def h():
    return torch.arange(24.0).reshape(4, 6).cuda()
def index(*numbers):
    return torch.tensor(numbers).cuda()
p = torch.nn.Parameter(h())
layer = torch.nn.Linear(6, 3).cuda()
"""
_TENSORS = """
h() + h() | h() @ h().t() | layer(h()) | h()[1] | h()[:, 1:3] | h()[h() > 3] | h().cuda() |
h().half() | h().float() | h().type(torch.float64) | h().new_zeros(3) | h().new_tensor([1.0]) |
h().new(2) | torch.as_tensor(h()) | torch.zeros_like(h()) | p | copy.deepcopy(layer).weight |
copy.deepcopy(h()) | h().t().contiguous() | torch.nonzero(h()) | torch.unique(h()) |
h().clone() | h().detach() | torch.zeros_like(h()).index_add_(0, index(1, 2, 3, 0), h()) |
torch.einsum("ij,kj->ik", h(), h()) | torch.nn.LSTM(6, 3).cuda()(h())[0] |
F.conv1d(h()[None], torch.ones(2, 4, 3).cuda()) |
F.batch_norm(h(), torch.zeros(6).cuda(), torch.ones(6).cuda()) | F.dropout(h(), 0.5, True) |
torch.cdist(h(), h()) | torch.isin(h(), h()) | torch.stack([h(), h()]) | h()[index(3, 0)] |
h()[torch.tensor([1])] | h().masked_fill(h() > 1, 0.0) | h().requires_grad_() |
h().share_memory_() | torch.inference_mode()(lambda: h() + 1)() |
torch.vmap(lambda a: a * 2)(h()) | F.embedding(index(1, 2), h()) |
torch.nn.utils.rnn.pad_sequence([h(), h()]) | F.pad(h(), (1, 1)) |
torch.autograd.grad((p * 2).sum(), [p])[0] | h().copy_(torch.zeros(4, 6)) | h().sort()[0] |
+h() | h().topk(2)[1] | F.interpolate(h()[None, None], scale_factor=2.0) |
h().scatter(1, index(0)[None], 1.0) | torch.where(h() > 1) [0] | h().gather(1, index(0)[None]) |
h().roll(1) | h().flip(0) | -h() | 1 - h() | h().repeat(2, 1) | h().expand(2, 4, 6) |
F.one_hot(index(1, 2)) | h().cumsum(0) | torch.linalg.norm(h()) |
F.grid_sample(h()[None, None], torch.zeros(1, 2, 2, 2).cuda(), align_corners=False) | 2 ** h() |
F.cross_entropy(h(), index(0, 1, 2, 3)) | F.max_pool1d(h(), 2) | h().to_sparse().to_dense() |
~(h() > 1)
"""
_HOST = """
h().tolist()[0][1] == 1.0 | h().sum().item() == 276.0 | float(h().sum()) == 276.0 |
len(h()) == 4 | int(h().sum()) == 276 | bool((h() >= 0).all()) | 3.0 in h() |
float(h().max()) == 23.0 | h().data_ptr() | f"{h().sum():.1f}" == "276.0" |
h().cpu().add(1).is_cpu | torch.ones(4)[index(1).cpu()].is_cpu | len(list(h())) == 4 |
h().untyped_storage().nbytes() == 96 | not h().is_pinned() | h().shape == (4, 6) |
h().size(1) == 6 and h().dim() == h().ndim == 2 and h().numel() == 24 and h().stride() == (6, 1) |
h().dtype is torch.float32 and h().is_floating_point() and h().is_contiguous() |
h().element_size() == 4
"""


def test_operations_make_gpu_tensors_when_run_on_handles(shim: Snippet) -> None:
    on_gpu = "made.is_cuda and made.device.type == 'cuda'"
    programs = {call: f"{_SETUP}\nmade = {call}\nassert {on_gpu}" for call in calls(_TENSORS)}
    failures = failures_of(shim, programs)

    assert failures == {}, "\n".join(failures.values())


def test_operations_answer_the_host_when_asked(shim: Snippet) -> None:
    failures = failures_of(shim, {call: f"{_SETUP}\nassert {call}" for call in calls(_HOST)})

    assert failures == {}, "\n".join(failures.values())
