"""Write epochs: every write through a handle is counted on its storage."""

from tests.kit.programs.snippets import Snippet, failures_of

_WRITES = """
x.add_(1) | x.data.mul_(2) | x.__setitem__(0, 1.0) | x.__iadd__(1) | x[0].zero_() |
x.copy_(torch.ones(2, 2)) | torch.add(x, 1, out=x) | torch._foreach_add_([x], 1) |
F.relu(x, inplace=True) | torch.relu_(x) | torch.nn.init.zeros_(x) | torch.nn.init.normal_(x) |
x.T.zero_() | x.untyped_storage().fill_(0) | x.index_put_((torch.tensor([0]),), torch.tensor(1.0)) |
torch.ops.aten.add_.Tensor(x, x) | torch.ops.aten.add_(x, x) | F.dropout(x, inplace=True) |
torch.nn.ReLU(inplace=True)(x) | x.real.zero_() | x.detach().zero_() |
F.silu(x.data, inplace=True) |
torch.sum(torch.ones(3, 2).cuda(), 0, out=x[0]) | x.masked_fill_(x > 0, 1.0) | x.normal_() |
torch.zeros(2, 2, device="cuda").set_(x).zero_() | x.untyped_storage().copy_(other) |
F.embedding(rows, x, max_norm=0.5) | F.embedding_bag(rows, x, rows[:1], 0.5) |
F.batch_norm(other_rows, x[0], x[1], training=True) | F.instance_norm(images, x[0], x[1]) |
x.untyped_storage().__setitem__(0, 1) | torch.nn.Parameter(x).data.zero_() | x.view(4).sub_(1) |
torch.nn.utils.clip_grads_with_norm_([with_grad], 1e-3, torch.ones(()).cuda())
"""
_READS = """
x + x | x.sum().item() | x.requires_grad_() | x.detach() | x.to("cpu") | F.relu(x) | x.data |
x.shape | x.cpu() | x.untyped_storage() | x.data_ptr() | x.tolist() | x[0] | str(x) | x.view(4) |
F.embedding(rows, x) | F.embedding_bag(rows, x, rows[:1]) | torch.embedding(x, rows) |
F.batch_norm(other_rows, x[0], x[1], x[0], x[1]) |
F.instance_norm(images, x[0], x[1], use_input_stats=False) | norm(other_rows)
"""
_SETUP = """
F = torch.nn.functional
from torch_shim.tensors import write_epochs
x = torch.ones(2, 2).cuda()
other = torch.zeros(2, 2).untyped_storage()
rows, other_rows = torch.tensor([0, 1]).cuda(), torch.ones(3, 2).cuda()
images = torch.ones(1, 2, 3, 3).cuda()
norm = torch.nn.BatchNorm1d(2).cuda().eval()
with_grad = torch.zeros(2, 2).cuda()
with_grad.grad = x
mark = write_epochs.marked(x)
epoch, writes = mark.epoch, write_epochs.writes
"""


def calls(text: str) -> list[str]:
    """The expressions of a list."""
    return [" ".join(call.split()) for call in text.split("|")]


def test_epoch_changes_when_a_tensor_is_written(shim: Snippet) -> None:
    later = "mark.epoch > epoch and write_epochs.writes > writes"
    programs = {call: f"{_SETUP}\n{call}\nassert {later}" for call in calls(_WRITES)}
    failures = failures_of(shim, programs)

    assert failures == {}, "\n".join(failures.values())


def test_epoch_stays_when_a_tensor_is_read(shim: Snippet) -> None:
    same = "mark.epoch == epoch and write_epochs.writes == writes"
    programs = {call: f"{_SETUP}\n{call}\nassert {same}" for call in calls(_READS)}
    failures = failures_of(shim, programs)

    assert failures == {}, "\n".join(failures.values())


def test_mark_is_one_when_tensors_share_a_storage(shim: Snippet) -> None:
    shim("""
    import gc
    from torch_shim.tensors.write_epochs import mark_of, marked
    x = torch.ones(2, 2).cuda()
    assert mark_of(x) is None
    mark = marked(x)
    gc.collect()
    assert all(mark_of(t) is mark for t in (x[0], x.data, x.detach(), x.T, torch.nn.Parameter(x)))
    assert mark_of(x.clone()) is None and not mark.untracked and mark_of(x + 1) is None
    """)


def test_epochs_change_when_a_training_step_runs(dynamo_shim: Snippet) -> None:
    dynamo_shim("""
    from torch_shim.tensors import write_epochs
    from torch_shim.tensors.write_epochs import marked
    def changed(work, *tensors):
        before = [marked(t).epoch for t in tensors]
        work()
        return all(marked(t).epoch > old for t, old in zip(tensors, before))
    x = torch.ones(2, 2).cuda()
    norm = torch.nn.BatchNorm1d(2).cuda()
    state = norm.running_mean, norm.running_var, norm.num_batches_tracked
    assert changed(lambda: norm(x), *state)
    layer = torch.nn.Linear(2, 2).cuda()
    layer(x).sum().backward()
    for options in ({"foreach": False}, {"foreach": True}, {"fused": True}):
        optimizer = torch.optim.Adam(layer.parameters(), **options)
        assert changed(optimizer.step, layer.weight, layer.bias), options
    assert changed(lambda: layer.load_state_dict(layer.state_dict()), layer.weight)
    writes = write_epochs.writes
    layer.weight.data = torch.zeros(2, 2).cuda()
    assert write_epochs.writes > writes
    table = torch.nn.Embedding(3, 2, max_norm=0.1).cuda()
    assert changed(lambda: table(torch.tensor([1]).cuda()), table.weight)
    """)


def test_writes_are_noticed_when_threads_race(shim: Snippet) -> None:
    shim("""
    import threading
    from torch_shim.tensors import write_epochs
    tensors = [torch.zeros(1).cuda() for _ in range(4)]
    seen = set()
    def write(x):
        for _ in range(300):
            before = write_epochs.writes
            x.add_(1)
            assert write_epochs.writes != before
    threads = [threading.Thread(target=write, args=(x,)) for x in tensors]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert all(x.item() == 300 for x in tensors)
    """)


def test_versions_are_those_of_each_tensor_when_some_have_none(shim: Snippet) -> None:
    shim("""
    from torch_shim.tensors import write_epochs
    written = torch.zeros(3, device="cuda")
    written.add_(1).add_(1)
    with torch.inference_mode():
        uncounted = torch.zeros(3, device="cuda")
    for tensors in ([], [written], [uncounted], [written, uncounted, torch.zeros(3)]):
        expected = [write_epochs.version_of(tensor) for tensor in tensors]
        assert write_epochs.versions_of(tensors) == expected, tensors
    assert write_epochs.version_of(written) == 2
    """)


def test_tensors_in_lists_beside_numbers_are_handles(shim: Snippet) -> None:
    shim("""
    from torch_shim.tensors.handles import CudaTensor, wrap
    inner = torch.zeros(3)
    wrap([1, 2.0, None, (3, [inner, "x"]), {"a": 4}])
    assert type(inner) is CudaTensor
    values = torch.arange(6.0, device="cuda").view(2, 3)
    assert values.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert values[torch.tensor(1)].tolist() == [3.0, 4.0, 5.0]
    assert values[torch.tensor([1, 0]), 0].tolist() == [3.0, 0.0]
    """)
