"""torch.distributed with NCCL in one process, and its refusal for several."""

import pytest

from tests.kit.programs.snippets import Snippet

_START = """
import torch.distributed as dist
dist.init_process_group({backend!r}, store=dist.HashStore(), rank=0, world_size=1{more})
x = torch.arange(3.0).cuda()
"""


@pytest.mark.parametrize("backend", ["nccl", None, "cpu:gloo,cuda:nccl"])
def test_group_of_one_process_is_made_when_nccl_is_asked_for(
    shim: Snippet, backend: str | None
) -> None:
    shim(
        _START.format(backend=backend, more=", device_id=torch.device('cuda', 0)")
        + """
dist.all_reduce(x)
assert x.is_cuda and x.tolist() == [0, 1, 2] and dist.get_world_size() == 1
dist.barrier()
dist.destroy_process_group()
"""
    )


def test_collectives_are_identities_when_there_is_one_process(shim: Snippet) -> None:
    shim(
        _START.format(backend="nccl", more="")
        + """
from torch_shim.tensors import write_epochs
assert dist.get_backend() == "nccl"
made = [torch.zeros(3).cuda() for _ in range(5)]
epochs = [write_epochs.marked(tensor).epoch for tensor in made]
dist.all_gather([made[0]], x)
dist.all_gather_into_tensor(made[1], x)
dist.reduce_scatter_tensor(made[2], x)
dist.all_to_all_single(made[3], x)
dist.scatter(made[4], [x], src=0)
for tensor, epoch in zip(made, epochs):
    assert tensor.is_cuda and tensor.tolist() == [0, 1, 2], tensor
    assert write_epochs.marked(tensor).epoch != epoch
work = dist.all_reduce(x, async_op=True)
work.wait()
dist.broadcast(x, 0), dist.reduce(x, 0), dist.barrier(device_ids=[0])
assert x.tolist() == [0, 1, 2]
objects = [None]
dist.all_gather_object(objects, {"a": 1})
assert objects == [{"a": 1}]
group = dist.new_group([0])
dist.all_reduce(x, group=group)
assert dist.get_backend(group) == "nccl"
"""
    )


def test_data_parallel_module_trains_when_there_is_one_process(shim: Snippet) -> None:
    shim(
        _START.format(backend="nccl", more="")
        + """
import warnings
warnings.simplefilter("ignore")
layer = torch.nn.Linear(3, 2).cuda()
parallel = torch.nn.parallel.DistributedDataParallel(layer, device_ids=[0])
parallel(torch.ones(4, 3).cuda()).sum().backward()
assert layer.weight.grad.is_cuda and layer.weight.grad.tolist() == [[4.0] * 3] * 2
"""
    )


def test_group_is_refused_when_it_has_several_processes(shim: Snippet) -> None:
    shim("""
    import torch.distributed as dist
    from torch_shim.errors import UnsupportedCall
    try:
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=2)
    except UnsupportedCall as error:
        assert "2 processes" in str(error) and "gloo" in str(error)
    else:
        raise AssertionError
    """)


def test_group_of_nccl_itself_is_refused_when_it_is_made_by_hand(shim: Snippet) -> None:
    shim("""
    import torch.distributed as dist
    from torch_shim.errors import UnsupportedCall
    if hasattr(dist, "ProcessGroupNCCL"):
        dist.ProcessGroupNCCL.Options()
        try:
            dist.ProcessGroupNCCL(dist.HashStore(), 0, 1)
        except UnsupportedCall:
            pass
        else:
            raise AssertionError
    """)
