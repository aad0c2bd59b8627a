"""Traced modules: CPU tensors raise where CUDA raises, and the graphs still serve other calls."""

import pytest

from tests.kit.programs.snippets import Snippet

_SETUP = """
import warnings
warnings.simplefilter("ignore")
from torch_shim.process_report import report
F = torch.nn.functional
class Net(torch.nn.Module):
    def __init__(self, work):
        super().__init__()
        self.work = work
        self.weight = torch.nn.Parameter(torch.ones(3, 3))
        self.layer, self.table = torch.nn.Linear(3, 3), torch.nn.Embedding(3, 3)
    def forward(self, *values):
        return self.work(self, *values)
g, c, c0, ci = torch.ones(3, 3).cuda(), torch.ones(3, 3), torch.tensor(2.0), torch.tensor([0, 1])
"""
_REFUSED = [
    "lambda m, x: m.layer(x)",
    "lambda m, x: x + m.weight",
    "lambda m, x: m.weight * torch.ones(3)",
    "lambda m, x: torch.cat([m.weight, x])",
    "lambda m, x: x.clone().add_(m.weight)",
    "lambda m, x: m.table(x[0].long())",
    "lambda m, x: x[m.weight[0].long()]",
    "lambda m, x: torch.where(x > 0, m.weight, 0.0)",
    "lambda m, x: F.scaled_dot_product_attention(m.weight[None], m.weight[None], x[None])",
]
_TAKEN = [
    ("lambda m, x: m.layer(x) + torch.tensor(2.0)", "g"),
    ("lambda m, x: m.layer(x) * m.weight.mean() + x", "g"),
    ("lambda m, x, s: m.layer(x) * s", "g, c0"),
    ("lambda m, x, i: m.layer(x)[i]", "g, ci"),
    ("lambda m, x, i: m.layer(x)[:, i]", "g, ci"),
    ("lambda m, x: m.layer(x.cuda())", "c"),
    ("lambda m, x: torch.zeros_like(m.weight).copy_(x) + m.weight", "c"),
    ("lambda m, x: m.layer(x).split(1)[0] + x.unbind()[1]", "g"),
    ("lambda m, x: m.layer(x) + torch.arange(3, device=x.device)", "g"),
]


def test_module_raises_as_on_cuda_when_its_input_is_on_the_cpu(tracing_shim: Snippet) -> None:
    tracing_shim(f"""{_SETUP}
for text in {_REFUSED!r}:
    net = Net(eval(text)).cuda().eval()
    for _ in range(2):
        try:
            with torch.no_grad():
                net(c)
        except RuntimeError as error:
            assert "device" in str(error), (text, error)
        else:
            raise AssertionError(text)
""")


@pytest.mark.parametrize("order", ["good first", "bad first"])
def test_graph_answers_the_right_calls_when_a_wrong_one_came_between(
    tracing_shim: Snippet, order: str
) -> None:
    tracing_shim(f"""{_SETUP}
net = Net(lambda m, x: m.layer(x) + m.weight).cuda().eval()
with torch.no_grad():
    for value in ([g, c, g] if {order!r} == "good first" else [c, g, c, g]):
        before = sum(report.counts.local_calls.values())
        try:
            made = net(value)
        except RuntimeError as error:
            assert value is c and "same device" in str(error), error
        else:
            assert value is g and made.is_cuda
            # No manager: a graph that answers is counted as a local call.
            assert sum(report.counts.local_calls.values()) == before + 1, report.counts.local_calls
            assert "no GPU manager" in str(report.counts.local_calls), report.counts.local_calls
""")


def test_module_is_traced_whole_when_cuda_takes_both_devices(tracing_shim: Snippet) -> None:
    tracing_shim(f"""{_SETUP}
for text, values in {_TAKEN!r}:
    net = Net(eval(text)).cuda().eval()
    with torch.no_grad():
        made = net(*eval(f"({{values}},)"))
    assert made.is_cuda, text
assert len(report.counts.breaks) == 0, report.counts.breaks
""")
