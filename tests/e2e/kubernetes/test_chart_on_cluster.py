"""Our chart on a real Kubernetes: installed, used, killed part by part, upgraded, taken down.

Tests of one story: they run in this order, and the last one takes everything down. What is typed
is what docs/kubernetes.md says.
"""

import json
from collections.abc import Callable

import pytest

from tests.e2e.kubernetes.chart_stack import FUNCTIONS, OURS, ChartStack
from tests.e2e.kubernetes.documented import commands
from tests.kit.network.policy_rules import Policies
from tests.kit.page.grey_picture import right_classes
from tests.kit.waiting import wait_until

pytestmark = pytest.mark.usefixtures("inside")

_GREETS = "-f {folder}/stack.yml --filter greets"
_PARTS = {"etcd": 1, "scheduler": 2, "gateway": 1, "gpu-manager": 1}


def answers_rightly(chart: ChartStack, part: str) -> None:
    """Wait for the right numbers."""
    expected = right_classes()
    wait_until(
        lambda: chart.classes() == expected, "calls are answered", instead=lambda: chart.said(part)
    )


def answers_on_a_gpu(chart: ChartStack) -> None:
    """Wait until a GPU holds the model, no answer being wrong meanwhile, and ask once more."""
    expected = right_classes()

    def placed() -> bool:
        """The first calls may be computed in the function itself; then a GPU answers."""
        assert chart.classes() in ([], expected)
        return bool(chart.held_models())

    wait_until(placed, "a GPU holds its model", instead=lambda: chart.said("gpu-manager"))
    answers_rightly(chart, "gpu-manager")


def test_documented_commands_install_it_and_a_function_answers(chart: ChartStack) -> None:
    for command in commands("Install"):
        said = chart.shell(command)
        if "gpufaas status" in command:
            assert "leads" in said
            assert "n1/cpu:0" in said
    forward, *others = commands("Deploy a function")
    assert forward.endswith("&")
    with chart.in_background(forward.removesuffix("&"), 8080):
        said = [chart.shell(command) for command in others][-1]
    assert [each["class"] for each in json.loads(said)["classes"]] == right_classes()


def test_function_on_a_gpu_is_reached_over_tls_and_answers_what_its_model_says(
    chart: ChartStack,
) -> None:
    answers_on_a_gpu(chart)
    address = variables(chart, "classify")["GPUFAAS_ADDRESS"]
    assert address.startswith(f"tls:gpufaas-gpu-manager.{OURS}.svc.cluster.local:7801#")


def variables(chart: ChartStack, name: str) -> dict[str, str]:
    """The environment of the one pod of a function."""
    (pod,) = chart.function_pods(name)
    (container,) = pod["spec"]["containers"]
    return {each["name"]: each.get("value", "") for each in container["env"]}  # empty ones lack it


def test_function_scales_to_two_to_none_and_wakes_when_called(chart: ChartStack) -> None:
    chart.login()
    chart.faas("deploy", "-f", chart.stack_file, "--filter", "greets")
    wait_until(lambda: greeting(chart) == "good day you", "it answers")
    for count in (2, 0):
        assert chart.scale("greets", count)
        wait_until(lambda: len(chart.function_pods("greets")) == count, f"{count} pods")  # noqa: B023
        wait_until(lambda: chart.replicas("greets") == count, f"{count} are ready")  # noqa: B023
    assert chart.call("greets", "again").text == "good day again"


def greeting(chart: ChartStack) -> str:
    answer = chart.call("greets", "you")
    return answer.text if answer.is_success else ""


def test_function_is_updated_without_a_failed_call(chart: ChartStack) -> None:
    with chart.called_all_the_while("greets") as calls:
        wait_until(lambda: len(calls.answers) > 20, "calls are answered")
        chart.faas("deploy", "-f", chart.stack_file, "--filter", "greets", "--env", "GREETING=hi")
        wait_until(lambda: calls.answers[-1] == "hi you", "the new version answers")
        wait_until(lambda: len(chart.function_pods("greets")) == 1, "the old one has ended")
        more = len(calls.answers) + 20
        wait_until(lambda: len(calls.answers) > more, "calls are answered")
    assert calls.failures == []
    assert set(calls.answers) == {"good day you", "hi you"}


def test_logs_have_what_the_function_printed(chart: ChartStack) -> None:
    asked = ("logs", "greets", "--tail=false", "--lines=5")
    chart.call("greets", "logged")
    wait_until(lambda: "called with logged" in chart.faas(*asked), "the line is logged")


def test_policies_let_in_whom_each_part_needs_and_nobody_else(chart: ChartStack) -> None:
    """The bridge of this node enforces no policy: what they say is evaluated for every pair."""
    node = chart.node
    pods = [
        *node.items(f"/api/v1/namespaces/{OURS}/pods"),
        *node.items(f"/api/v1/namespaces/{FUNCTIONS}/pods"),
        _STRANGER,
    ]
    policies = Policies(
        node.items("/apis/networking.k8s.io/v1/networkpolicies"),
        {each["metadata"]["name"]: each for each in node.items("/api/v1/namespaces")},
    )
    allowed = {
        (_part(source), _part(target), port)
        for source in pods
        for target in pods
        for port in (2379, 2380, 7700, 7701, 7801, 8080)
        if _has(target, port) and policies.let_through(source, target, port)
    }
    anybody = {_part(pod) for pod in pods}
    bounded = {"scheduler", "gpu-manager", "etcd"}  # what they may reach is bounded, too
    expected = {(source, "gateway", 8080) for source in anybody - bounded}
    expected |= {(source, "function", 8080) for source in anybody - bounded}
    expected |= {(source, "scheduler", 7700) for source in ("gateway", "gpu-manager", "scheduler")}
    expected |= {("function", "gpu-manager", 7801)}
    expected |= {("scheduler", "etcd", 2379), ("etcd", "etcd", 2379), ("etcd", "etcd", 2380)}
    assert allowed == expected


_STRANGER = {
    "metadata": {"name": "stranger", "namespace": "default", "labels": {}},
    "spec": {"containers": [{"ports": []}]},
    "status": {"podIP": "10.244.0.250"},
}


def _part(pod: dict[str, dict[str, dict[str, str]]]) -> str:
    labels = pod["metadata"].get("labels") or {}
    if "faas_function" in labels:
        return "function"
    return labels.get("app.kubernetes.io/component", "stranger")


def _has(pod: dict[str, dict[str, list[dict[str, list[dict[str, int]]]]]], port: int) -> bool:
    listed = pod["spec"]["containers"][0].get("ports") or []
    return port in {each["containerPort"] for each in listed}


def leader(chart: ChartStack) -> str:
    """The pod of the scheduler that leads."""
    said = chart.command("status", "--once")
    return next(word for word in said.split() if word.startswith("gpufaas-scheduler-"))


def first(part: str) -> Callable[[ChartStack], str]:
    """The only pod of a part."""
    return lambda chart: str(chart.pods(part)[0]["metadata"]["name"])


@pytest.mark.parametrize(
    ("part", "chosen"),
    [
        ("scheduler", leader),
        ("gpu-manager", first("gpu-manager")),
        ("gateway", first("gateway")),
        ("etcd", first("etcd")),
    ],
)
def test_calls_are_answered_again_when_a_pod_is_killed(
    chart: ChartStack, part: str, chosen: Callable[[ChartStack], str]
) -> None:
    name = chosen(chart)
    uid = next(
        pod["metadata"]["uid"] for pod in chart.pods(part) if pod["metadata"]["name"] == name
    )
    chart.kill_pod(name)
    wait_until(
        lambda: chart.is_ready(part, _PARTS[part], without=uid),
        f"{part} is back",
        instead=lambda: chart.said(part),
    )
    answers_rightly(chart, part)
    assert greeting(chart) == "hi you"


def test_functions_answer_while_the_nodes_kubelet_is_away(chart: ChartStack) -> None:
    chart.node.kill("kubelet")
    with chart.called_all_the_while("greets") as calls:
        wait_until(lambda: len(calls.answers) > 20, "calls are answered")
        answers_rightly(chart, "gateway")
    assert calls.failures == []
    # It probes its pods anew, and Services leave them out until they have answered.
    chart.node.start("kubelet")
    wait_until(lambda: chart.scale("greets", 2), "the gateway is reached")
    wait_until(lambda: chart.replicas("greets") == 2, "the kubelet starts pods again")


def test_upgrade_gives_functions_the_memory_of_their_own_node(chart: ChartStack) -> None:
    wait_until(lambda: chart.scale("greets", 1), "the gateway is reached")
    wait_until(lambda: len(chart.function_pods("greets")) == 1, "one pod is left")
    before = {pod["metadata"]["uid"] for pod in chart.function_pods("greets")}
    for command in commands("Shared memory on a function's own node"):
        chart.shell(command)
    wait_until(
        lambda: (
            variables(chart, "classify")["GPUFAAS_ADDRESS"] == "unix:/run/gpufaas/node.sock"
            if len(chart.function_pods("classify")) == 1
            else False
        ),
        "the function is deployed again",
        instead=lambda: chart.said("gateway"),
    )
    answers_rightly(chart, "gpu-manager")
    answers_on_a_gpu(chart)
    assert before & {pod["metadata"]["uid"] for pod in chart.function_pods("greets")}


def test_nothing_is_left_when_it_is_uninstalled(chart: ChartStack) -> None:
    chart.faas("remove", "greets")
    forward, *others = commands("Uninstall")
    with chart.in_background(forward.removesuffix("&"), 8080):
        chart.shell(others[0])
    for command in others[1:]:
        chart.shell(command)
    wait_until(lambda: not left(chart), "nothing is left", instead=lambda: str(left(chart)))


def left(chart: ChartStack) -> list[str]:
    """What is not the cluster's own."""
    kinds = "all,secrets,configmaps,serviceaccounts,roles,rolebindings,networkpolicies,pvc,pdb"
    found = []
    for namespace in (OURS, FUNCTIONS):
        words = ("get", kinds, f"--namespace={namespace}", "--output=name")
        found += [f"{namespace}/{name}" for name in chart.node.kubectl(*words).split()]
    clusters = ("configmap/kube-root-ca.crt", "serviceaccount/default")
    return [one for one in found if not one.endswith(clusters)]
