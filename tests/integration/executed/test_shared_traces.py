"""Programs under `gpufaas exec` with many instances of a class, which share what was traced."""

from pathlib import Path

from tests.kit.programs.executed_programs import ForkedPrograms

MODELS = """
import copy
import gc
import torch
from torch._dynamo.utils import counters

class Block(torch.nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.scale = scale
        self.label = "block"

    def forward(self, x):
        y = self.norm(torch.relu(self.linear(x))) * self.scale
        return -y if self.label == "negative" else y

class Net(torch.nn.Module):
    def __init__(self, scale=0.5, depth=3):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(scale) for _ in range(depth))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

torch.manual_seed(0)
x = torch.randn(3, 8)

def check(model):
    plain = copy.deepcopy(model)
    on_gpu = model.cuda()
    with torch.no_grad():
        expected = plain(x)
        assert torch.allclose(on_gpu(x.cuda()).cpu(), expected, atol=1e-6)
    return on_gpu

def traces():
    return counters["stats"]["unique_graphs"]
"""


def test_instances_of_a_known_class_are_not_traced_again(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    program = (
        MODELS
        + """
check(Net().eval())
gc.collect()
kept = [check(Net().eval()) for _ in range(12)]
assert traces() == 1, traces()
for model in kept:  # by turns: each has its own weights
    with torch.no_grad():
        model.blocks[1].linear.weight.mul_(0.5)
    check(copy.deepcopy(model).cpu())
    plain = copy.deepcopy(model).cpu()
    with torch.no_grad():
        assert torch.allclose(model(x.cuda()).cpu(), plain(x), atol=1e-6)
assert traces() == 1, traces()
"""
    )
    done, counts = programs.execute(program, tmp_path)
    assert done.returncode == 0, done.stderr
    assert counts["local_calls"] == {}


def test_instances_that_differ_have_their_own_answers(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    program = (
        MODELS
        + """
def with_change(change):
    model = Net().eval()
    change(model)
    return model

def tie(model):
    model.blocks[0].linear.weight = model.blocks[1].linear.weight

def share(model):
    model.blocks[0] = model.blocks[1]

changes = [
    lambda model: model.train(),
    lambda model: model.blocks[1].norm.train(),
    lambda model: setattr(model.blocks[0], "scale", 3.0),
    lambda model: setattr(model.blocks[0], "label", "negative"),
    lambda model: setattr(model.blocks[2].norm, "eps", 0.5),
    lambda model: model.blocks[0].register_forward_hook(lambda *args: args[-1] * 2),
    lambda model: model.blocks[2].register_forward_pre_hook(lambda _, args: (args[0] + 1,)),
    lambda model: setattr(model.blocks[0], "forward", lambda x: x * 3),
    lambda model: setattr(model.blocks[0].linear, "bias", None),
    tie,
    share,
]
known = [check(Net().eval()) for _ in range(3)]
for change in changes:
    check(with_change(change))
    model = check(Net().eval())
    change(model)  # one that was called as the others before
    check(copy.deepcopy(model).cpu()) if change is not changes[0] else None
    plain = copy.deepcopy(model).cpu()
    with torch.no_grad():
        assert torch.allclose(model(x.cuda()).cpu(), plain(x), atol=1e-6), changes.index(change)
tied = check(with_change(tie))
with torch.no_grad():
    tied.blocks[1].linear.weight.mul_(2)
check(copy.deepcopy(tied).cpu())
Block.forward = lambda self, x: self.linear(x)
for model in (*known, Net().eval()):
    check(copy.deepcopy(model).cpu())
    with torch.no_grad():
        plain = copy.deepcopy(model).cpu()
        assert torch.allclose(model.cuda()(x.cuda()).cpu(), plain(x), atol=1e-6)
"""
    )
    done, counts = programs.execute(program, tmp_path)
    assert done.returncode == 0, done.stderr
    assert counts["graph_calls"] >= 40


def test_variants_without_end_still_run_in_graphs(programs: ForkedPrograms, tmp_path: Path) -> None:
    program = (
        MODELS
        + """
for number in range(70):  # more than Dynamo traces of one function
    model = Net(depth=1).eval()
    model.blocks[0].label = f"block {number}"
    check(model)
"""
    )
    done, counts = programs.execute(program, tmp_path)
    assert done.returncode == 0, done.stderr
    assert counts["local_calls"] == {}
    assert counts["graph_calls"] == 70


def test_training_one_instance_leaves_the_others_on_the_gpu(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    program = (
        MODELS
        + """
trained, other = Net().eval().cuda(), Net().eval().cuda()
for _ in range(3):
    trained(x.cuda()).sum().backward()
assert trained.blocks[0].linear.weight.grad is not None
for _ in range(20):
    other(x.cuda())
"""
    )
    done, counts = programs.execute(program, tmp_path)
    assert done.returncode == 0, done.stderr
    assert counts["graph_calls"] == 21
