"""Every document that the chart renders is one that Kubernetes takes, and they fit together."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.helm.chart_values import VALUES
from tests.integration.helm.schemas import OPERATORS, VERSIONS, trouble
from tests.kit.engines.kubernetes.helm import (
    BUILD_S,
    CHART,
    NAMESPACE,
    Document,
    Helm,
    Rendered,
    labels_match,
)

# The first run builds helm.
pytestmark = pytest.mark.timeout(BUILD_S + 60)

# Secrets that the files of values name, as somebody else's.
THEIRS = frozenset(
    {"basic-auth", "theirs-cluster", "theirs-etcd", "theirs-etcd-password", "theirs-node"}
    | {"theirs-queue", "theirs-queue-ca", "theirs-registry", "theirs-tracing"}
)
HOSTS_FOLDERS = {"socket", "spill", "all-gpus"}
# Why a container may do more than the others.
MORE_RIGHTS = {"gpu-manager": ["SETUID", "SETGID", "KILL"]}


@pytest.mark.parametrize("values", VALUES, ids=lambda path: path.stem)
def test_chart_has_nothing_that_lint_minds(helm: Helm, values: Path) -> None:
    done = helm.run("lint", "--strict", str(CHART), "--values", str(values))

    assert done.code == 0, done.out + done.errors
    assert "[WARNING]" not in done.out
    assert "[ERROR]" not in done.out


def test_documents_are_valid_in_every_version(rendered: Rendered) -> None:
    for version in VERSIONS:
        for document in rendered.documents:
            said = trouble(document, version)
            assert not said, f"{version}: {document['kind']} {document['metadata']['name']}: {said}"


def test_a_document_that_kubernetes_would_refuse_is_found(rendered: Rendered) -> None:
    spoiled = next(iter(rendered.of_kind("StatefulSet")))
    spoiled = {**spoiled, "spec": {**spoiled["spec"], "replicas": "2", "replica": 2}}

    said = trouble(spoiled, VERSIONS[0])

    assert "replicas" in said
    assert "replica'" in said


def test_versions_that_the_chart_is_not_for_are_refused(helm: Helm) -> None:
    done = helm.run("template", "g", str(CHART), "--kube-version", "1.25.0")

    assert done.code != 0
    assert "kubeVersion" in done.errors


def test_names_are_used_once_and_namespaces_are_told(rendered: Rendered) -> None:
    found = [
        (each["kind"], each["metadata"].get("namespace", NAMESPACE), each["metadata"]["name"])
        for each in rendered.documents
    ]

    assert len(found) == len(set(found))
    others = {namespace for kind, namespace, _ in found if namespace != NAMESPACE}
    assert others <= {"faas", "openfaas-fn", "team-a"}


def test_only_a_gateway_that_runs_functions_has_rights_in_the_cluster(rendered: Rendered) -> None:
    runs = 'provider = "kubernetes"' in str(rendered.of_kind("ConfigMap"))
    rights = [each for each in rendered.documents if "rbac" in each["apiVersion"]]
    bound = {subject["name"] for each in rights for subject in each.get("subjects", ())}
    assert bool(rights) == runs
    assert bound == ({rendered.pod("gateway").spec["serviceAccountName"]} if runs else set())
    accounts = {each["metadata"]["name"]: each for each in rendered.of_kind("ServiceAccount")}
    assert not any(each["automountServiceAccountToken"] for each in accounts.values())
    for pod in rendered.pods():
        assert pod.spec["serviceAccountName"] in accounts
        asks = runs and pod.component == "gateway"
        assert pod.spec["automountServiceAccountToken"] is asks
        assert pod.spec["enableServiceLinks"] is False


def test_what_is_mounted_exists(rendered: Rendered) -> None:
    for pod in rendered.pods():
        volumes = {each["name"]: each for each in pod.spec.get("volumes", ())}
        claims = {
            each["metadata"]["name"] for each in pod.owner["spec"].get("volumeClaimTemplates", ())
        }
        mounted = {each["name"] for each in pod.container.get("volumeMounts", ())}
        assert mounted == set(volumes) | claims, pod.component
        for volume in volumes.values():
            for source in volume.get("projected", {}).get("sources", [volume]):
                _assert_there(rendered, source)


def _assert_there(rendered: Rendered, source: Document) -> None:
    if "secret" in source:
        name = source["secret"].get("secretName") or source["secret"]["name"]
        if name in THEIRS:
            return
        data = rendered.one("Secret", name)
        known = {**data.get("data", {}), **data.get("stringData", {})}
        assert source["secret"]["items"], "a whole secret of ours says too much"
        assert {item["key"] for item in source["secret"]["items"]} <= set(known), name
    elif "configMap" in source:
        assert rendered.one("ConfigMap", source["configMap"]["name"])["data"]


def test_secrets_are_read_by_who_needs_them_alone(rendered: Rendered) -> None:
    for secret in rendered.of_kind("Secret"):
        keys = set(secret.get("data", {})) | set(secret.get("stringData", {}))
        used = set()
        for pod in rendered.pods():
            assert not [
                each for each in pod.container.get("env", ()) if "secretKeyRef" in str(each)
            ]
            for volume in pod.spec.get("volumes", ()):
                for source in volume.get("projected", {}).get("sources", [volume]):
                    one = source.get("secret", {})
                    if secret["metadata"]["name"] in (one.get("secretName"), one.get("name")):
                        used |= {item["key"] for item in one["items"]}
        assert used == keys, secret["metadata"]["name"]


def test_secrets_can_be_read_by_who_reads_them(rendered: Rendered) -> None:
    """Root reads its own, which others may not; nobody else reads as a member of its group."""
    for pod in rendered.pods():
        root = pod.spec["securityContext"]["runAsUser"] == 0
        assert ("fsGroup" in pod.spec["securityContext"]) != root
        for volume in pod.spec.get("volumes", ()):
            for kind in {"secret", "projected"} & set(volume):
                assert volume[kind]["defaultMode"] == (0o400 if root else 0o440), pod.component


def test_containers_have_no_more_rights_than_they_need(rendered: Rendered) -> None:
    for pod in rendered.pods():
        may = pod.container["securityContext"]
        assert may["allowPrivilegeEscalation"] is False
        assert may["readOnlyRootFilesystem"] is True
        assert may["capabilities"]["drop"] == ["ALL"]
        assert not may.get("privileged")
        pod_may = pod.spec["securityContext"]
        assert pod_may["seccompProfile"] == {"type": "RuntimeDefault"}
        if pod_may["runAsUser"] == 0:
            assert may["capabilities"]["add"] == MORE_RIGHTS[pod.component]
        else:
            assert "add" not in may["capabilities"]
            assert pod_may["runAsNonRoot"] is True
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod.spec)
        for volume in pod.spec.get("volumes", ()):
            assert "hostPath" not in volume or volume["name"] in HOSTS_FOLDERS


def test_nobody_is_root_where_tenants_have_no_users_of_their_own(helm: Helm) -> None:
    found = helm.template(None, "gpuManager.tenantUsers=false")

    assert all(pod.spec["securityContext"]["runAsNonRoot"] for pod in found.pods())


def test_every_pod_says_what_it_takes_and_how_it_is(rendered: Rendered) -> None:
    for pod in rendered.pods():
        resources = pod.container["resources"]
        assert "memory" in resources["limits"]
        assert {"cpu", "memory"} <= set(resources["requests"])
        if pod.owner["kind"] == "Pod":
            continue
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert pod.container[probe]["httpGet"]["port"] in pod.ports, (pod.component, probe)


def test_selectors_match_the_pods_that_they_are_for(rendered: Rendered) -> None:
    pods = {pod.component: pod.metadata["labels"] for pod in rendered.pods()}
    for document in rendered.of_kind("StatefulSet", "DaemonSet", "PodDisruptionBudget"):
        chosen = _chosen(document["spec"]["selector"], pods)
        assert chosen == [document["metadata"]["labels"]["app.kubernetes.io/component"]]
    for service in rendered.of_kind("Service"):
        component = service["metadata"]["labels"]["app.kubernetes.io/component"]
        chosen = _chosen({"matchLabels": service["spec"]["selector"]}, pods)
        assert chosen == ([] if component == "upstream" else [component])


def _chosen(selector: Document, pods: dict[str, Document]) -> list[str]:
    return [name for name, labels in pods.items() if labels_match(selector, labels)]


def test_services_lead_to_ports_that_pods_have(rendered: Rendered) -> None:
    for service in rendered.of_kind("Service"):
        component = service["metadata"]["labels"]["app.kubernetes.io/component"]
        if component == "upstream":
            assert service["spec"]["ports"][0]["targetPort"] == 8081
            continue
        ports = rendered.pod(component).ports
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in ports
            # Where a name leads to pods without a service's address, the port is the pods' own.
            if service["spec"].get("clusterIP") == "None":
                assert port["port"] == ports[port["targetPort"]]


def test_policies_are_about_pods_and_ports_that_are_there(rendered: Rendered) -> None:
    pods = {pod.component: pod for pod in rendered.pods()}
    labels = {name: pod.metadata["labels"] for name, pod in pods.items()}
    for policy in rendered.of_kind("NetworkPolicy"):
        component = policy["metadata"]["labels"]["app.kubernetes.io/component"]
        spec = policy["spec"]
        if component == "functions":
            assert spec["policyTypes"] == ["Egress"]
        else:
            assert _chosen(spec["podSelector"], labels) == [component]
            for rule in spec["ingress"]:
                assert {port["port"] for port in rule["ports"]} <= set(pods[component].ports)
        for target, ports in _targets(spec.get("egress", ()), labels):
            assert ports <= set(pods[target].ports), (component, target)


def _targets(rules: list[Document], labels: dict[str, Document]) -> Iterator[tuple[str, set[str]]]:
    """Our own pods that rules are about, and the ports that they name."""
    for rule in rules:
        for peer in rule.get("to", ()):
            for name in _chosen(peer.get("podSelector", {"matchLabels": {"": ""}}), labels):
                yield name, {port["port"] for port in rule["ports"]}


def test_there_are_no_policies_when_none_are_wished(helm: Helm) -> None:
    assert not helm.template(None, "networkPolicy.enabled=false").of_kind("NetworkPolicy")


@pytest.mark.parametrize(
    "values", [path for path in VALUES if path.stem != "open"], ids=lambda path: path.stem
)
def test_who_connects_is_let_in(rendered_with: Callable[[Path], Rendered], values: Path) -> None:
    rendered = rendered_with(values)
    policies = {
        each["metadata"]["labels"]["app.kubernetes.io/component"]: each["spec"]
        for each in rendered.of_kind("NetworkPolicy")
    }
    labels = {pod.component: pod.metadata["labels"] for pod in rendered.pods()}
    wanted = {("gateway", "scheduler", "http"), ("gpu-manager", "scheduler", "http")}
    wanted |= {("scheduler", "scheduler", "http"), ("test", "scheduler", "http")}
    if "etcd" in labels:
        wanted |= {("scheduler", "etcd", "client"), ("etcd", "etcd", "peer")}
    if "nats" in labels:
        wanted |= {("gateway", "nats", "clients")}
    for source, target, port in wanted:
        assert _let_in(policies[target]["ingress"], port, labels[source]), (source, target)
        if "Egress" in policies.get(source, {}).get("policyTypes", ()):
            reached = {
                (name, one)
                for name, ports in _targets(policies[source]["egress"], labels)
                for one in ports
            }
            assert (target, port) in reached, (source, target)
    for closed in {"etcd", "nats", "scheduler"} & set(policies):
        assert not _let_in(policies[closed]["ingress"], "client", {"faas_function": "f"})
        assert not _let_in(policies[closed]["ingress"], "http", {"faas_function": "f"})


def _let_in(rules: list[Document], port: str, labels: Document) -> bool:
    """Whether a pod of the same namespace is."""
    return any(
        labels_match(peer["podSelector"], labels)
        for rule in rules
        if port in {each["port"] for each in rule["ports"]}
        for peer in rule["from"]
        if "podSelector" in peer and "namespaceSelector" not in peer
    )


def test_operators_documents_are_there_when_they_are_wished(rendered: Rendered) -> None:
    kinds = {each["kind"] for each in rendered.documents} & OPERATORS
    ports = {pod.component: pod.ports for pod in rendered.pods()}
    services = rendered.of_kind("Service")

    assert not kinds or kinds == OPERATORS
    for monitor in rendered.of_kind("ServiceMonitor"):
        chosen = [
            each
            for each in services
            if labels_match(monitor["spec"]["selector"], each["metadata"]["labels"])
        ]
        assert len(chosen) == 1
        named = {port["name"] for port in chosen[0]["spec"]["ports"]}
        assert {each["port"] for each in monitor["spec"]["endpoints"]} <= named
        assert monitor["metadata"]["labels"]["release"] == "prometheus"
        assert chosen[0]["metadata"]["labels"]["app.kubernetes.io/component"] in ports
