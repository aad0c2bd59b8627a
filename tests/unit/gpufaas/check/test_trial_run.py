"""A check's findings of a run: reasons in plain words, heavy work, and the printed text."""

import json
import re
from importlib import resources
from pathlib import Path

import pytest

from gpufaas.check.trial_run import (
    LocalGraph,
    OutsideOperator,
    RefusedCall,
    TrialRun,
)
from gpufaas.check.verdicts import Finding, judge, share_in_graphs
from gpufaas.commands.check import Checked, as_json, as_text
from torch_shim import advice
from torch_shim.process_report import GraphBreak

# Said where Dynamo does not say it by one of its registered names.
UNREGISTERED = ["generic_jump TensorVariable()"]


def registered() -> list[str]:
    """Every kind of graph break that Dynamo or the shim knows."""
    text = (resources.files("torch._dynamo") / "graph_break_registry.json").read_text()
    ours = (resources.files("torch_shim.capture") / "dynamo.py").read_text()
    dynamos = [versions[0]["Gb_type"] for versions in json.loads(text).values()]
    return dynamos + re.findall(r'end_graph\(\s*"([^"]+)"', ours) + UNREGISTERED


def ran(**more: object) -> TrialRun:
    """A run that ended well, of a model of 100 operators, all in graphs."""
    facts = {"code": 0, "took_s": 1.0, "graph_calls": 2, "graph_operators": 100}
    return TrialRun(**{**facts, "local_operators": 0, **more})  # type: ignore[arg-type] # a builder


def checked(*found: Finding, run: TrialRun | None = None) -> Checked:
    return Checked("app.py", found, run or ran())


def test_patterns_match_dynamos_messages() -> None:
    names = registered()
    wrong = []
    for pattern, remedy in advice.BREAKS:
        reasons = {name: advice.for_break(name)[0] for name in names if re.search(pattern, name)}
        if remedy.why not in reasons.values():
            wrong.append((pattern, reasons))

    assert wrong == []


@pytest.mark.parametrize(
    ("reason", "why"),
    [
        (
            "Could not guard on data-dependent expression Eq(u0, 1)",
            "a branch depends on a tensor's value",
        ),
        ("Data-dependent branching", "a branch depends on a tensor's value"),
        ("generic_jump TensorVariable()", "a branch depends on a tensor's value"),
        (
            "Unsupported Tensor.item() call with capture_scalar_outputs=False",
            "a tensor's value becomes a Python number",
        ),
        ("Dynamic shape operator", "the result's size depends on values"),
        ("torch.jit.script/freeze modules unsupported", "TorchScript is inside of the model"),
        ("an unknown reason", "Dynamo cannot follow it"),
    ],
)
def test_break_is_reported_in_plain_words(reason: str, why: str) -> None:
    (found,) = judge(ran(breaks=[GraphBreak("app.py", 4, reason)]))
    assert (found.why, found.outcome, found.heavy) == (why, "local", False)
    assert found.remedy


@pytest.mark.parametrize(
    ("reason", "why"),
    [
        ("only CPU tensors", "its tensors are on the CPU"),
        ("layout torch.sparse_coo", "workers take dense tensors only"),
        (
            "gradients are asked for: training runs locally",
            "gradients are computed on the function's own processor",
        ),
        (
            "function torch._dynamo.utils.wrapped_asarray",
            "NumPy computes on the function's own processor",
        ),
        (
            "program refused: operator 'h:print' is not allowed",
            "workers do not have this higher-order operator",
        ),
        (
            "program refused: operator 'a:mine::op.default' is not allowed",
            "workers know PyTorch's own operators only",
        ),
        ("function mine.fast_norm", "workers know PyTorch's own operators only"),
        ("operator failed: KeyError", "a worker failed at it, and the function did not"),
        ("something new", "something new"),
    ],
)
def test_local_graph_is_reported_in_plain_words(reason: str, why: str) -> None:
    (found,) = judge(ran(local=[LocalGraph("app.py", 7, reason, 100)]))
    assert (found.why, found.heavy) == (why, True)


@pytest.mark.parametrize(("operators", "heavy"), [(5, False), (6, True)])
def test_local_graph_is_heavy_when_it_has_more_than_a_twentieth_of_all_operators(
    operators: int, *, heavy: bool
) -> None:
    entry = LocalGraph("app.py", 7, "only CPU tensors", operators)

    (found,) = judge(ran(local=[entry], graph_operators=100 - operators, local_operators=operators))

    assert (found.line, found.heavy) == (7, heavy)


@pytest.mark.parametrize(
    ("calls", "fastest_s", "heavy"), [(1, 0.02, True), (20, 0.001, True), (20, 0.0001, False)]
)
def test_operator_is_heavy_when_all_calls_would_take_long_at_its_fastest(
    calls: int, fastest_s: float, *, heavy: bool
) -> None:
    operator = OutsideOperator("app.py", 9, "matmul", calls, 5.0, fastest_s)

    found = list(judge(ran(operators=[operator])))

    assert [finding.heavy for finding in found] == [True] * heavy


def test_refusals_are_reported_once_a_line() -> None:
    places = [(3, "CUDAGraph"), (3, "CUDAGraph.replay"), (4, "CUDAGraph")]
    run = ran(refused=[RefusedCall("app.py", *place, "leave it out") for place in places])

    assert [(finding.line, finding.what) for finding in judge(run)] == [
        (3, "CUDAGraph"),
        (4, "CUDAGraph"),
    ]


def test_share_is_of_the_operators_of_modules() -> None:
    assert share_in_graphs(ran(graph_operators=75, local_operators=25)) == 0.75
    assert share_in_graphs(ran(graph_operators=0)) is None


@pytest.mark.parametrize(
    ("found", "passes"),
    [
        (Finding("local", False, "app.py", 1, "x", "light", ""), True),
        (Finding("local", True, "app.py", 1, "x", "work", "do"), False),
        (Finding("cannot", False, "app.py", 1, "x", "no", "do"), False),
    ],
)
def test_check_passes_when_nothing_is_heavy_here_or_impossible(
    found: Finding, *, passes: bool
) -> None:
    assert checked(found).passes is passes


def test_check_fails_when_the_program_fails() -> None:
    assert not checked(run=ran(code=3)).passes
    assert "the program failed" in as_text(checked(run=ran(code=3)))
    text = as_text(checked(run=ran(code=1, graph_operators=0)))
    assert "torch.compile" not in text, "it never came to compute"


def test_sparse_operator_has_no_remedy() -> None:
    names = ("mm", "sparse matmul", "_sparse_mm")
    operators = [
        OutsideOperator("app.py", line, name, 3, 0.1, 0.1) for line, name in enumerate(names)
    ]
    found = list(judge(ran(operators=operators)))
    assert [bool(finding.remedy) for finding in found] == [True, False, False]


def test_text_groups_items_under_the_advice_they_share() -> None:
    file, why = str(Path("app.py").resolve()), ("no such thing", "leave it out")
    found = [Finding("cannot", False, file, line, f"use{line}", *why) for line in (12, 3)]

    text = as_text(checked(*found, run=ran())).splitlines()

    start = text.index("cannot be done: 2")
    assert text[start + 1 : start + 4] == [
        "  no such thing; leave it out",
        "    app.py:3   use3",
        "    app.py:12  use12",
    ]
    assert text[-1] == "to change: 2 that cannot be done"


def test_text_fits_100_columns_when_names_and_reasons_are_long() -> None:
    file, why = "/far/site-packages/away/" + "deep/" * 12 + "x.py", "because of this " * 12
    found = Finding("cannot", False, file, 10**5, "name" * 30, why, "do that instead " * 12)
    run = ran(breaks=[GraphBreak("app.py", 4, "Data-dependent branching" * 6)])

    text = as_text(checked(found, *judge(run), run=run))

    assert max(map(len, text.splitlines())) <= 100
    assert "far/site-packages" not in text


def test_json_has_place_reason_and_remedy_of_each_finding() -> None:
    run = ran(breaks=[GraphBreak("app.py", 4, "Data-dependent branching")], local_operators=100)

    answer = json.loads(as_json(checked(*judge(run), run=run)))

    (found,) = answer["findings"]
    assert found["file"] == str(Path("app.py").resolve())
    assert (found["line"], found["seen"], found["what"]) == (4, "break", "Data-dependent branching")
    assert found["why"]
    assert found["remedy"]
    assert (answer["passes"], answer["run"]["share_in_graphs"]) == (True, 0.5)


def test_text_says_what_runs_on_the_cpu_when_nothing_ran_on_the_gpu() -> None:
    run = ran(
        graph_calls=0,
        graph_operators=0,
        operators=[OutsideOperator("app.py", 9, "mm", 3, 0.001, 0.0001)],
    )
    text = as_text(checked(*judge(run), run=run))
    assert text.startswith("app.py: ran in 1.0 s, exit code 0\n")
    assert "runs on the CPU: 1" in text
    assert "nothing stands in the way" not in text
    assert "all of it ran on the\nfunction's own processor" in text
    assert text.splitlines()[-1].startswith("nothing ran on the GPU")
