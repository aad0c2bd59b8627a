"""What users are told about a module names what they wrote, and a remedy that helps."""

from tests.kit.programs.snippets import Snippet

_TOLD = """
import warnings
from torch_shim.process_report import report
from torch_shim.advice import told_places

warnings.simplefilter("ignore")
told = []
told_places.tell = lambda place, what, advice: told.append((place.line, what, advice.why))
"""


def test_gradients_are_those_of_the_module_when_its_backward_pass_is_told(
    tracing_shim: Snippet,
) -> None:
    tracing_shim(
        _TOLD
        + """
layer = torch.nn.Linear(2, 2).cuda()
layer(torch.ones(1, 2).cuda()).sum().backward()
names = [what for reason, what, _ in report._logged if reason == "backward"]
assert names == ["the backward pass of Linear"], names
"""
    )


def test_buffers_are_no_inputs_when_training_writes_to_them(tracing_shim: Snippet) -> None:
    tracing_shim(
        _TOLD
        + """
class Counts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros(()))
    def forward(self, x):
        self.seen += 1
        return self.layer(x)

class Writes(torch.nn.Linear):
    def forward(self, x):
        x.add_(1)
        return super().forward(x)

norm = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
for module in (norm, Counts(), Writes(2, 2)):
    module.cuda()(torch.ones(3, 2).cuda())
gradients = "gradients are computed on the function's own processor"
assert [why for _, _, why in told] == [
    gradients, gradients, "it changes its inputs while gradients are recorded"
], told
"""
    )


def test_module_says_why_it_was_passed_over_when_it_has_a_backward_hook(
    tracing_shim: Snippet,
) -> None:
    tracing_shim(
        _TOLD
        + """
model = torch.nn.Sequential(torch.nn.Linear(2, 2)).cuda()
model[0].register_full_backward_hook(lambda *_: None)
model(torch.ones(1, 2).cuda())
report.expect_modules()
report._tell_of_no_module()
assert [why for _, _, why in told] == ["a module has a backward hook"], told
assert [*report.counts.local_calls] == ["Dynamo passes over its forward; its parts run in graphs"]
"""
    )


def test_break_is_at_the_programs_line_when_it_happens_inside_of_torch(
    tracing_shim: Snippet,
) -> None:
    tracing_shim(
        _TOLD
        + """
@torch.library.custom_op("mine::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2

twice.register_fake(torch.empty_like)

class Model(torch.nn.Linear):
    def forward(self, x):
        return twice(super().forward(x)).relu()

with torch.no_grad():
    Model(2, 2).cuda()(torch.ones(1, 2).cuda())
(found,) = report.counts.breaks
assert (found.file, found.reason) == ("snippet", "Custom operator"), found
"""
    )


def test_number_is_named_when_a_worker_refuses_its_method(shim: Snippet) -> None:
    shim("""
    from torch_shim.advice import for_local
    refused = for_local("program refused: operator 'm:__round__' is not allowed")
    assert refused.why == "it computes with a number that was a tensor's value"
    """)
