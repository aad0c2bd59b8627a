"""What policies let through is evaluated as Kubernetes defines it; so are those of the chart."""

from typing import Any

import pytest

from tests.integration.helm.chart_values import VALUES
from tests.kit.engines.kubernetes.helm import BUILD_S, NAMESPACE, Helm, Rendered
from tests.kit.network.policy_rules import Policies, matches

pytestmark = pytest.mark.timeout(BUILD_S + 60)

Json = dict[str, Any]
_SPACES = {name: {"metadata": {"labels": {"kind": name}}} for name in ("a", "b")}
_PORTS = [{"name": "http", "containerPort": 80}, {"name": "other", "containerPort": 81}]


def pod(name: str, namespace: str = "a", address: str = "10.0.0.1") -> Json:
    return {
        "metadata": {"name": name, "namespace": namespace, "labels": {"app": name}},
        "spec": {"containers": [{"ports": _PORTS}]},
        "status": {"podIP": address},
    }


def policy(way: str, *rules: Json, app: str = "x") -> Json:
    selector = {"matchLabels": {"app": app}}
    spec = {"podSelector": selector, "policyTypes": [way], way.lower(): list(rules)}
    return {"metadata": {"namespace": "a"}, "spec": spec}


def let_through(
    *policies: Json, source: Json | None = None, port: int = 80, protocol: str = "TCP"
) -> bool:
    found = Policies(policies, _SPACES)
    return found.let_through(source or pod("y"), pod("x"), port, protocol)


_FROM_Y = {"podSelector": {"matchLabels": {"app": "y"}}}
_TO_X = {"podSelector": {"matchLabels": {"app": "x"}}}


def test_everything_is_open_where_no_policy_selects_the_pod() -> None:
    assert let_through()
    assert let_through(policy("Ingress", app="z"))


def test_a_policy_without_rules_lets_nobody_through() -> None:
    assert not let_through(policy("Ingress"))
    assert not let_through(policy("Egress", app="y"))


def test_both_sides_have_to_agree() -> None:
    assert let_through(policy("Ingress", {"from": [_FROM_Y]}), policy("Egress", {"to": [_TO_X]}))
    assert not let_through(policy("Ingress", {"from": [_FROM_Y]}), policy("Egress", app="y"))


def test_peers_are_of_the_policys_namespace_unless_one_is_named() -> None:
    far = pod("y", "b")
    near = policy("Ingress", {"from": [_FROM_Y]})
    named = policy("Ingress", {"from": [{"namespaceSelector": {"matchLabels": {"kind": "b"}}}]})
    both = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "b"}}, **_TO_X}
    assert not let_through(near, source=far)
    assert let_through(named, source=far)
    assert not let_through(named)
    assert not let_through(policy("Ingress", {"from": [both]}), source=far)


def test_ports_are_named_numbered_or_ranges_of_one_protocol() -> None:
    named = policy("Ingress", {"ports": [{"port": "http"}]})
    ranged = policy("Ingress", {"ports": [{"port": 70, "endPort": 80}]})
    assert let_through(named)
    assert not let_through(named, port=81)
    assert not let_through(named, protocol="UDP")
    assert let_through(ranged)
    assert not let_through(ranged, port=81)


def test_addresses_are_those_of_a_block_without_its_exceptions() -> None:
    block = {"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]}}
    inside, excepted = pod("y", address="10.2.0.1"), pod("y", address="10.1.0.1")
    assert let_through(policy("Ingress", {"from": [block]}), source=inside)
    assert not let_through(policy("Ingress", {"from": [block]}), source=excepted)


def test_expressions_choose_labels() -> None:
    def chosen(operator: str, *values: str) -> bool:
        one = {"key": "app", "operator": operator, "values": list(values)}
        return matches({"matchExpressions": [one]}, {"app": "x"})

    assert chosen("In", "x", "y")
    assert not chosen("NotIn", "x")
    assert chosen("Exists")
    assert not chosen("DoesNotExist")


@pytest.mark.parametrize(
    "values", [path for path in VALUES if path.stem != "open"], ids=lambda path: path.stem
)
def test_functions_reach_gpu_managers_and_no_other_part(helm: Helm, values: Any) -> None:
    rendered = helm.template(values)
    policies = Policies(rendered.of_kind("NetworkPolicy"), {})
    function = pod("f", "openfaas-fn")
    for target in _pods(rendered):
        for port in (each["containerPort"] for each in _ports(target)):
            component = target["metadata"]["labels"]["app.kubernetes.io/component"]
            wanted = (component, port) == ("gpu-manager", 7801)
            wanted |= component == "gateway" and _is_in_front(rendered)
            assert policies.let_through(function, target, port) == wanted, (component, port)


def _is_in_front(rendered: Rendered) -> bool:
    return 'role = "gateway"' in str(rendered.of_kind("ConfigMap"))


def _pods(rendered: Rendered) -> list[Json]:
    return [
        {
            "metadata": {**one.metadata, "namespace": NAMESPACE},
            "spec": one.spec,
            "status": {"podIP": "10.0.0.2"},
        }
        for one in rendered.pods()
        if one.owner["kind"] != "Pod"
    ]


def _ports(target: Json) -> list[Json]:
    (container,) = target["spec"]["containers"]
    return list(container["ports"])
