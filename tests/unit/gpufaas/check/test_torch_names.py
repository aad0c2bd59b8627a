"""The table of names against the shim: what the shim refuses, answers, and does not know."""

import ast
from pathlib import Path

import pytest
import torch

import torch_shim
from gpufaas.check.findings import UseOutcome
from gpufaas.check.torch_names import RULES, rule_of
from gpufaas.check.torch_uses import uses_in
from torch_shim.cuda_api import cuda_module, memory_functions
from torch_shim.tensors import tensor_types

ON_GPU = " of a CUDA tensor"  # refused, or not, by what is not in the source
# A program for every refusal that the shim spells out; without one here, a new one fails below.
REFUSALS = {
    "a DTensor of a CUDA tensor": "torch.distributed.tensor.distribute_tensor(x, mesh)",
    "Tensor.__dlpack__ of a CUDA tensor": "x.__dlpack__()",
    "to_dlpack of a CUDA tensor": "torch.utils.dlpack.to_dlpack(x)",
    "torch.cuda.Event(interprocess=True)": "torch.cuda.Event(interprocess=True)",
    "torch.cuda.Event.ipc_handle": "event.ipc_handle()",
    "torch.cuda.ExternalStream": "torch.cuda.ExternalStream(7)",
}


def refusals() -> dict[str, str]:
    """Call and remedy of every `UnsupportedCall(...)` in the shim that is written out."""
    found = {}
    for path in Path(torch_shim.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(
                    func=ast.Name(id="UnsupportedCall"),
                    args=[ast.Constant(value=str(call)), ast.Constant(value=str(remedy))],
                ):
                    found[call] = remedy
                case _:
                    pass
    return found


def test_names_cannot_be_done_when_the_shim_refuses_them() -> None:
    wanted = {name: (UseOutcome.CANNOT, remedy) for name, remedy in cuda_module.REFUSED.items()}
    rules = {name: RULES.get(f"torch.cuda.{name}") for name in wanted}

    wrong = [
        (name, rule)
        for name, rule in rules.items()
        if rule is None or (rule.outcome, rule.remedy) != wanted[name]
    ]

    assert wanted
    assert wrong == []


def test_every_call_that_the_shim_raises_for_is_known_here() -> None:
    assert set(refusals()) == set(REFUSALS)


@pytest.mark.parametrize(("call", "program"), REFUSALS.items())
def test_call_is_reported_with_the_shims_remedy_when_the_shim_raises_for_it(
    call: str, program: str
) -> None:
    (use,) = uses_in("app.py", ast.parse(f"import torch\n{program}"))

    assert use.rule.outcome is (UseOutcome.LOCAL if call.endswith(ON_GPU) else UseOutcome.CANNOT)
    assert use.rule.remedy == refusals()[call]


ANSWERED = {**cuda_module.CONSTANTS, **cuda_module.FUNCTIONS, **memory_functions.MEMORY}


def test_names_are_answered_locally_when_the_shim_answers_them() -> None:
    rules = {name: RULES.get(f"torch.cuda.{name}") for name in sorted(ANSWERED)}

    wrong = [
        (name, rule)
        for name, rule in rules.items()
        if rule is None or (rule.outcome, rule.heavy) != (UseOutcome.LOCAL, False)
    ]

    assert rules
    assert wrong == []


def test_tensor_types_are_redirected() -> None:
    rules = {name: RULES.get(f"torch.cuda.{name}") for name in sorted(tensor_types.DTYPES)}

    wrong = [
        (name, rule)
        for name, rule in rules.items()
        if rule is None or rule.outcome is not UseOutcome.REDIRECTED
    ]

    assert rules
    assert wrong == []


def test_public_names_of_torch_cuda_have_a_rule_of_their_own() -> None:
    assert [name for name in torch.cuda.__all__ if f"torch.cuda.{name}" not in RULES] == []


def test_rule_is_that_of_the_longest_part_of_a_name() -> None:
    assert rule_of("torch.cuda.nvtx.range") is RULES["torch.cuda.nvtx"]
    assert rule_of("torch.cuda.nvtx_of_tomorrow") is RULES["torch.cuda"]
    assert rule_of("torch.nn.Linear") is None


def test_rules_explain_why_and_what_to_do_when_they_are_a_problem() -> None:
    without_why = [
        (name, rule)
        for name, rule in RULES.items()
        if not rule.why and rule.outcome is not UseOutcome.REDIRECTED
    ]
    without_remedy = [
        (name, rule)
        for name, rule in RULES.items()
        if not rule.remedy and (rule.heavy or rule.outcome is UseOutcome.CANNOT)
    ]

    assert (without_why, without_remedy) == ([], [])
