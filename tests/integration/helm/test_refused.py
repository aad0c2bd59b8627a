"""Values that cannot be meant are refused before anything is made, and say which they are."""

import pytest

from tests.kit.engines.kubernetes.helm import BUILD_S, Helm

pytestmark = pytest.mark.timeout(BUILD_S + 60)

# Each with what is said of it.
BY_SCHEMA = {
    "mode=gateway": "mode: mode must be one of",
    "polciy.name=lb": "(root): Additional property polciy is not allowed",
    "policy.parameters.o3_limit=-1": "policy.parameters.o3_limit: Must be greater",
    "scheduler.replicas=0": "scheduler.replicas: Must be greater",
    "scheduler.logLevel=loud": "scheduler.logLevel: scheduler.logLevel must be one of",
    "scheduler.settings.Listen=x": 'scheduler.settings: Property name of "Listen"',
    "gateway.replicas=2": "gateway: Additional property replicas is not allowed",
    "gateway.service.type=ExternalName": "gateway.service.type: gateway.service.type must be one",
    "gateway.persistence.size=8GB": "gateway.persistence.size: Does not match pattern",
    "openfaas.functionNamespaces=fn": "openfaas.functionNamespaces: Invalid type",
    "openfaas.upstreamUrl=https://n:1": "openfaas.upstreamUrl: Does not match pattern",
    "gpuManager.devices=gpu": "gpuManager.devices: Does not match pattern",
    "gpuManager.access=privileged": "gpuManager.access: gpuManager.access must be one of",
    "gpuManager.storeMemory=16GiB": "gpuManager.storeMemory: Does not match pattern",
    "gpuManager.hostEviction=fifo": "gpuManager.hostEviction: gpuManager.hostEviction must be one",
    "gpuManager.port=70000": "gpuManager.port: Must be less",
    "gpuManager.gpuOverlap=0": "gpuManager.gpuOverlap: Must be greater",
    "gpuManager.tls.fingerprint=abc": "gpuManager.tls.fingerprint: Does not match pattern",
    "gpuManager.trafficPolicy=Near": "gpuManager.trafficPolicy: gpuManager.trafficPolicy must be",
    "etcd.replicas=2": "etcd.replicas: etcd.replicas must be one of",
    "etcd.image.digest=latest": "etcd.image.digest: Does not match pattern",
    "externalEtcd.prefix=gpufaas": "externalEtcd.prefix: Does not match pattern",
    "queue.kind=kafka": "queue.kind: queue.kind must be one of",
    "queue.external.url=nats://user:secret@n:1": "queue.external.url: Does not match pattern",
    "monitoring.serviceMonitor.interval=15s!": "monitoring.serviceMonitor.interval: Does not",
    "tracing.ratio=2": "tracing.ratio: Must be less",
    "certificates.days=0": "certificates.days: Must be greater",
}
BY_TEMPLATES = [
    (["etcd.enabled=false"], "externalEtcd.endpoints"),
    (["queue.kind=external"], "queue.external.url"),
    (["gateway.settings.listen=0.0.0.0:1"], "gateway.settings.listen"),
    (["scheduler.settings.secret_file=/x"], "scheduler.settings.secret_file"),
    (["gpuManager.tenantUsers=false", "gpuManager.hostSocket.enabled=true"], "tenantUsers"),
    (["gpuManager.tenantUsers=false", "gpuManager.spill.hostPath=/x"], "tenantUsers"),
    (
        ["etcd.enabled=false", "externalEtcd.endpoints={https://e:1}", "externalEtcd.user=u"],
        "externalEtcd.passwordSecret",
    ),
    (
        [
            "etcd.enabled=false",
            "externalEtcd.endpoints={https://e:1}",
            "externalEtcd.clientCertificate=true",
        ],
        "externalEtcd.tlsSecret",
    ),
]


@pytest.fixture(scope="module")
def said_of_all(helm: Helm) -> str:
    """The schema finds every fault at once."""
    return helm.refusal(*BY_SCHEMA)


@pytest.mark.parametrize("pair", BY_SCHEMA)
def test_a_wrong_value_is_refused_by_name(said_of_all: str, pair: str) -> None:
    assert f"- {BY_SCHEMA[pair]}" in said_of_all


def test_nothing_is_refused_beside_what_is_wrong(said_of_all: str) -> None:
    assert "values don't meet the specifications of the schema" in said_of_all
    faults = [line for line in said_of_all.splitlines() if line.startswith("- ")]
    assert len(faults) <= len(BY_SCHEMA) + 1  # a name that fits no pattern is reported twice


@pytest.mark.parametrize(("pairs", "named"), BY_TEMPLATES)
def test_values_that_do_not_go_together_are_refused(
    helm: Helm, pairs: list[str], named: str
) -> None:
    said = helm.refusal(*pairs)

    assert "execution error" in said
    assert named in said
