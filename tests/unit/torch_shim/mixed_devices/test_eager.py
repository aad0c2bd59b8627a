"""Operator by operator: what CUDA takes of tensors on two devices, and what it refuses."""

from tests.kit.programs.snippets import Snippet, calls, failures_of

_SETUP = """
F = torch.nn.functional
g, c = torch.ones(3, 3).cuda(), torch.ones(3, 3)
g1, c1 = torch.ones(3).cuda(), torch.ones(3)
g0, c0 = torch.tensor(2.0).cuda(), torch.tensor(2.0)
gi, ci = torch.tensor([0, 1, 2]).cuda(), torch.tensor([0, 1, 2])
gi0, ci0 = torch.tensor(1).cuda(), torch.tensor(1)
gm, cm = torch.tensor([True, False, True]).cuda(), torch.tensor([True, False, True])
lstm = torch.nn.LSTM(3, 2).cuda()
packed = torch.nn.utils.rnn.pack_padded_sequence(g[None], torch.tensor([1, 1, 1]))
def assign(target, index, value):
    target[index] = value
    return target
"""
# What CUDA takes; the results are on the GPU.
_ON_GPU = """
g + c0 | c0 + g | g.add_(c0) | g * c0 - c0 | torch.where(g > 0, g, c0) |
torch.where(c0 > 0, g, g) | g.clamp(min=c0) | g.masked_fill(gm, c0) | g.fill_(c0) | c0 + g0 |
g0 + c0 | torch.maximum(g, c0) | g.lerp(g, c0) | g > c0 | torch.pow(g, c0) | torch.pow(c0, g) |
g[ci] | g[cm] | g[cm, 1] | g[ci0] | g[[0, 1]] | g[ci, gi] | assign(g, ci, g1) | assign(g, 0, c1) |
assign(g, slice(0, 2), c[:2]) | assign(g, cm, c0) | assign(g, gi, c0) |
assign(g, (gm, 0), torch.ones(1)) | assign(g, ..., c) | g.index_put((ci,), g1) |
g.index_put((ci,), c0) | g.copy_(c) | g.view_as(c) | g1.expand_as(c) | g.reshape_as(c) |
g.type_as(c).cuda() | g.to(c).cuda() | g.new_tensor([1.0]) | c.to(g) | torch.full_like(g, 3) |
torch.tensor_split(g, ci)[1] | lstm(packed)[0].data |
F.ctc_loss(g[:, None].log_softmax(-1), gi[None, :2] + 1, torch.tensor([3]), torch.tensor([1])) |
torch.addcmul(g, g, c0) | torch.special.xlogy(g, c0) | torch.broadcast_tensors(g0, c1)[0] |
torch.broadcast_tensors(g0, g1)[0] | torch.meshgrid(g0, g1, indexing="ij")[1] |
torch.meshgrid([g0, g1], indexing="xy")[0] | torch.block_diag(g0, g) |
torch.atleast_1d(g0, c1)[0] | torch.cat([g, g]) | torch.cartesian_prod(g1, g1) |
torch._foreach_mul([g], c0)[0] |
F.multi_head_attention_forward(g1[None].view(1, 1, 3), g1.view(1, 1, 3), g1.view(1, 1, 3), 3, 1,
    torch.empty([0]), torch.zeros(9).cuda(), None, None, False, 0.0, g, g1, training=False,
    use_separate_proj_weight=True, q_proj_weight=g, k_proj_weight=g, v_proj_weight=g)[0]
"""
# What CUDA takes; the results are on the CPU.
_ON_CPU = """
c.copy_(g) | assign(c, 0, g1) | assign(c, ..., g) | c[gi0] | c.view_as(g) | c1.expand_as(g) |
assign(c, gi0, g1) | assign(c, ci, g0) | torch.broadcast_tensors(g0, c1)[1] | c.resize_as_(g) |
torch.atleast_2d([g1, c1])[1] | c.index_put((ci,), g0)
"""
_REFUSED = """
g + c | c + g | g.add_(c) | c.add_(g) | c0.add_(g0) | g1 + c[0] | torch.where(cm, g1, g1) |
g @ c | c @ g | F.linear(g, c) | F.linear(c, g, g1) | F.linear(g, g, c1) |
F.conv1d(c[None], g[None]) | torch.cat([g, c]) | torch.cat((c, g)) | torch.stack([g0, c0]) |
torch.hstack([g, c]) | torch.vstack((g, c)) | torch.block_diag(g, c) |
torch.meshgrid(g1, c1, indexing="ij") | torch.meshgrid([g0, c0], indexing="ij") |
torch.einsum("ij,jk", g, c) | torch.bmm(g[None], c[None]) | torch.tensordot(g, c) |
torch.linalg.multi_dot([g, c]) | F.embedding(ci, g) | F.embedding(ci0, g) | F.embedding(gi, c) |
g.gather(0, ci[None]) | g.index_select(0, ci) | g1.index_select(0, ci0) |
g.scatter(0, ci[None], 1.0) | g.scatter_add_(0, gi[None], c) | g.index_add_(0, ci, g) |
g1.take(ci) | c[gi] | c[gm] | c[0, gi] | assign(c, gi, c1) | assign(g, gi, c1) |
assign(c, ci, g1) | assign(g, gm, c[:2]) | g.index_put((gi,), c1) | c.index_put((gi,), c1) |
g.masked_fill(cm, 1.0) | g.masked_select(cm) | g.lerp(c, 0.5) | torch.equal(g, c) |
F.cross_entropy(g, ci) | F.mse_loss(g, c) | F.batch_norm(g, c1, c1) | F.layer_norm(g, (3,), c1) |
lstm(c) | lstm(g, (torch.zeros(1, 2), torch.zeros(1, 2))) | torch.add(g, g, out=c) |
torch.searchsorted(g1, c1) | torch.bucketize(c0, g1) | torch._foreach_add([g], [c]) |
torch._foreach_add_([g], [c]) | F.scaled_dot_product_attention(g[None], g[None], c[None]) |
torch.isin(g1, c1) | torch.repeat_interleave(g1, ci) |
F.grid_sample(g[None, None], torch.zeros(1, 2, 2, 2)) |
torch.nn.functional.pairwise_distance(g, c) | torch.nn.utils.rnn.pad_sequence([g, c]) |
torch.nn.Linear(3, 3).cuda()(c) | torch.nn.Embedding(3, 3).cuda()(ci) | torch.dot(g1, c1)
"""


def test_results_are_on_the_gpu_when_cuda_takes_both(shim: Snippet) -> None:
    on_gpu = "made.is_cuda and made.cpu().is_cpu"
    programs = {call: f"{_SETUP}\nmade = {call}\nassert {on_gpu}" for call in calls(_ON_GPU)}
    failures = failures_of(shim, programs)

    assert failures == {}, "\n".join(failures.values())


def test_results_are_on_the_cpu_when_cuda_leaves_them_there(shim: Snippet) -> None:
    on_cpu = "made.is_cpu and type(made) is torch.Tensor"
    programs = {call: f"{_SETUP}\nmade = {call}\nassert {on_cpu}" for call in calls(_ON_CPU)}
    failures = failures_of(shim, programs)

    assert failures == {}, "\n".join(failures.values())


def test_calls_raise_as_on_cuda_when_the_devices_do_not_go_together(shim: Snippet) -> None:
    programs = {
        call: f"""{_SETUP}
try:
    {call}
except RuntimeError as error:
    assert "device" in str(error) or "cpu" in str(error), error
else:
    raise AssertionError("accepted")
"""
        for call in calls(_REFUSED)
    }
    failures = failures_of(shim, programs)

    assert failures == {}, "\n".join(failures.values())


def test_classes_of_a_program_are_refused_as_torch_s_when_devices_differ(shim: Snippet) -> None:
    shim("""
class Tagged(torch.Tensor):
    pass
class Other(torch.Tensor):
    pass
plain, number = torch.ones(2, device="cuda"), torch.tensor(2.0)
on_gpu, on_cpu = plain.as_subclass(Tagged), torch.ones(2).as_subclass(Tagged)
for gpu in (plain, on_gpu, torch.nn.Parameter(plain)):
    for cpu in (on_cpu, torch.ones(2).as_subclass(Other) if gpu is not on_gpu else on_cpu):
        for call in (lambda: gpu + cpu, lambda: cpu + gpu, lambda: torch.cat([gpu, cpu]),
                lambda: gpu.detach().add_(cpu), lambda: torch.add(gpu, other=cpu)):
            try:
                call()
            except RuntimeError as error:
                assert "Expected all tensors to be on the same device" in str(error), error
            else:
                raise AssertionError((type(gpu), type(cpu), call))
    assert (gpu * number.as_subclass(Tagged)).is_cuda and (gpu + on_cpu.cuda()).is_cuda
    assert on_cpu.clone().copy_(gpu).is_cpu and gpu.detach().clone().copy_(on_cpu).is_cuda
    assert gpu[torch.tensor([0]).as_subclass(Tagged)].is_cuda
""")
