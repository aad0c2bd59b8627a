"""workflow.yml: what a good file says, and the lines of what is wrong with a bad one."""

import pytest

from gateway_ext.model import FunctionId
from gateway_ext.workflows.errors import BadWorkflowFile
from gateway_ext.workflows.plan import read_workflow
from gateway_ext.workflows.yaml_lines import MOST_BYTES, MOST_PROBLEMS
from tests.kit.outcomes import outcome

GOOD = """
workflow: describe
slo_ms: 2000
stages:
  detect:
    function: pipeline
    retries: 2
    backoff_ms: 50
    timeout_ms: 1500
  classify: {function: classify, after: detect, by_handle: true}
  greet:
    function: hello
    after: [request, detect]
    when: detect.json.found[0].sure > 0.5 and request.json.name != null
    optional: true
  last:
    function: hello
    after: [classify, greet]
"""


def refused(text: str) -> list[str]:
    with pytest.raises(BadWorkflowFile) as caught:
        read_workflow(text)
    return str(caught.value).splitlines()


def stages(text: str) -> str:
    return f"workflow: w\nstages:\n{text}"


def test_file_describes_stages_and_who_waits_for_whom() -> None:
    plan = read_workflow(GOOD)

    assert str(plan.id) == "describe.openfaas-fn"
    assert (plan.slo_s, plan.timeout_s, plan.last) == (2.0, 300.0, ("last",))
    assert plan.graph.order == ("detect", "classify", "greet", "last")
    detect = plan.stages["detect"]
    assert detect.function == FunctionId("openfaas-fn", "pipeline")
    assert detect.sources == ("request",)
    assert (detect.retries, detect.backoff_s, detect.timeout_s) == (2, 0.05, 1.5)
    assert plan.stages["classify"].by_handle
    assert plan.stages["greet"].optional
    assert plan.stages["greet"].when is not None
    assert plan.text == GOOD


def test_json_is_a_file_too() -> None:
    plan = read_workflow('{"workflow": "w", "stages": {"a": {"function": "f"}}}')

    assert plan.last == ("a",)


BAD_FILES = (
    ("", ["line 1: the workflow: a mapping is expected"]),
    ("a: [", ["line 1: expected the node content"]),
    ("- a", ["line 1: the workflow: a mapping is expected"]),
    ("workflow: w", ["line 1: the workflow: stages must list a stage"]),
    ("workflow: w\nstages: {}", ["line 2: the workflow: stages must list a stage"]),
    ("workflow: w\nstages: [a]", ["line 2: the workflow: stages must be a mapping"]),
    (stages("  a: f"), ["line 3: stages: a must be a mapping"]),
    (stages("  a: {}"), ["line 3: a: function: the function's name is missing"]),
    (stages("  a: {function: f}\nspeed: 1"), ["line 4: the workflow: speed is unknown"]),
    (stages("  a:\n    function: f\n    aftr: b"), ["line 5: a: aftr is unknown"]),
    (stages("  a: {function: f}\n  a: {function: f}"), ["line 4: stages: a is given twice"]),
    (stages("  a:\n    function: f\n    after: b"), ["line 5: a: after names the unknown"]),
    (stages("  a:\n    function: f\n    after: a"), ["line 5: a: after names the stage"]),
    (stages("  a: {function: f, retries: 11}"), ["a: retries must be a whole number <= 10"]),
    (stages("  a: {function: f, retries: -1}"), ["a: retries must be a whole number >= 0"]),
    (stages("  a: {function: f, retries: 1.5}"), ["a: retries must be a whole number"]),
    (stages("  a: {function: f, retries: 0x5}"), ["a: retries must be a whole number"]),
    (stages("  a: {function: 7}"), ["a: function must be a text, got `int`"]),
    (stages("  a: {function: f.elsewhere}"), ["f.elsewhere is not in the namespace"]),
    (stages("  a: {function: f, optional: 1}"), ["a: optional must be true or false"]),
    (stages("  a: {function: f, when: }"), ["a: when must be a text"]),
    (stages("  a: {function: f, when: yes}"), ["a: when must be a text"]),
    (stages("  a: {function: f, x.y: 1, z: 1}"), ["a: x.y is unknown", "a: z is unknown"]),
    (stages('  a: {function: f, "\\ud800": 1}'), ["a: ? is unknown"]),
    (stages('  a: {function: f, retries: "\\ud800"}'), ["line 3: a: half a surrogate pair"]),
    (stages('  a: {function: f, after: "\\ud800"}'), ["a: after names the unknown stage ?"]),
    (stages("  a: {function: f, when: status}"), ["a: when: 'status': a comparison"]),
    (stages("  request: {function: f}"), ["line 3: stages: request is the name of"]),
    (stages("  a b: {function: f}"), ["line 3: the stage name 'a b' may have letters"]),
    ("stages:\n  a: {function: f}", ["line 1: the workflow: workflow: the workflow's name"]),
    (f"workflow: {'w' * 64}\nstages:\n  a: {{function: f}}", ["longer than 63 letters"]),
    ("workflow: w\nslo_ms: 0\nstages:\n  a: {function: f}", ["line 2: the workflow: slo_ms"]),
    ("a: &x 1\nb: *x", ["line 2: aliases are not supported"]),
    ("[" * 9, ["line 1: it is nested more than 8 times"]),
    ("[" + "1," * 5000, ["line 1: there are more than 4000 values"]),
    ("#" * (MOST_BYTES + 1), ["line 1: the file is larger than"]),
    ("a: \x00", ["line 1: unacceptable character"]),
)  # fmt: skip


def test_bad_files_are_refused_with_their_lines() -> None:
    wrong = []
    for text, problems in BAD_FILES:
        refusal = outcome(read_workflow, text)
        lines = str(refusal).splitlines() if isinstance(refusal, BadWorkflowFile) else []
        if not all(any(problem in line for line in lines) for problem in problems):
            wrong.append((text, refusal))

    assert wrong == []


def test_cycle_is_refused_at_one_of_its_stages() -> None:
    waits = {"a": "request", "b": "d", "c": "b", "d": "c"}
    lines = [f"  {stage}: {{function: f, after: {before}}}\n" for stage, before in waits.items()]
    found = refused(stages("".join(lines)))

    assert found == ["line 4: it has the cycle b -> c -> d -> b"]


def test_cycle_is_refused_beside_other_errors() -> None:
    waits = {"a": "[a, none]", "b": "[a, a]", "d": "e", "e": "d"}
    lines = [f"  {stage}: {{function: f, after: {before}}}\n" for stage, before in waits.items()]
    found = refused(stages("".join(lines)))

    assert "line 5: it has the cycle d -> e -> d" in found
    assert len(found) == 4


def test_every_unknown_function_is_named() -> None:
    with pytest.raises(BadWorkflowFile) as caught:
        read_workflow(GOOD, lambda function: function.name == "hello")

    assert str(caught.value).splitlines() == [
        "line 6: detect: function: function pipeline is not deployed in openfaas-fn",
        "line 10: classify: function: function classify is not deployed in openfaas-fn",
    ]


def test_number_of_stages_edges_and_problems_is_bounded() -> None:
    many = "".join(f"  s{at}: {{function: f}}\n" for at in range(65))
    before = [f"s{at}" for at in range(40)]
    dense = "".join(
        f"  s{at}: {{function: f, after: [{', '.join(before[:at])}]}}\n" for at in range(40)
    )
    wrong = "".join(f"  s{at}: {{}}\n" for at in range(30))

    assert refused(stages(many)) == ["line 2: the workflow: stages are more than 64"]
    assert "wait for others more than 512 times" in refused(stages(dense))[0]
    assert len(refused(stages(wrong))) == MOST_PROBLEMS + 1
