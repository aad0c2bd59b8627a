"""A function's Deployment as it is sent and read, and what pods say."""

from typing import Any

import pytest

from gateway_ext.errors import BadDeployment, BadRequest
from gateway_ext.model import Deployment, FunctionId, Resources
from gateway_ext.providers.kubernetes import manifest
from gateway_ext.providers.kubernetes.manifest import ReleaseMarks
from gateway_ext.providers.kubernetes.provider import check_settings
from gateway_ext.providers.kubernetes.watched_functions import pod_state
from gateway_ext.settings import GatewaySettings

F = FunctionId("openfaas-fn", "f")
MARKS = ReleaseMarks("life", "release")
SETTINGS = GatewaySettings(
    kubernetes_gpu_pod='{"nodeSelector": {"gpu": "yes"}, "priorityClassName": "p"}'
)
GPU = {"GPUFAAS_ADDRESS": "unix:/run/gpus/node.sock", "GPUFAAS_ENABLED": "1", "PYTHONPATH": "/x"}


def pod_of(deployment: Deployment, injected: dict[str, str] | None = None) -> dict[str, Any]:
    made = manifest.manifest(deployment, SETTINGS, injected or {}, MARKS, 1)
    found: dict[str, Any] = made["spec"]["template"]["spec"]
    return found


def test_deployment_is_read_as_it_was_sent() -> None:
    wanted = Deployment(
        F,
        "image",
        process="python x --gpu",
        environment={"a": "1"},
        constraints=("zone=a",),
        secrets=("s",),
        labels={"own": "x"},
        annotations={"com.gpufaas.slo": "1s"},
        limits=Resources(memory="1Gi", gpu="1"),
        read_only=True,
    )
    made = manifest.manifest(wanted, SETTINGS, GPU, MARKS, 3)
    made["metadata"] |= {"creationTimestamp": "2026-01-02T03:04:05Z", "resourceVersion": "7"}

    stored = manifest.stored_function(made)

    assert stored is not None
    assert (stored.deployment, stored.wanted, stored.marks) == (wanted, 3, MARKS)
    assert stored.injected
    assert made["metadata"]["labels"]["own"] == "x"


def test_deployment_that_somebody_else_has_changed_is_no_function() -> None:
    made = manifest.manifest(Deployment(F, "image"), SETTINGS, {}, MARKS, 1)
    made["metadata"] |= {"creationTimestamp": "2026-01-02T03:04:05Z"}
    copied = {**made, "metadata": {**made["metadata"], "name": "copy"}}
    spoiled = {**made, "metadata": {**made["metadata"], "annotations": {}}}

    assert manifest.stored_function(made) is not None
    assert manifest.stored_function(copied) is None
    assert manifest.stored_function(spoiled) is None


def test_gpu_function_is_where_the_socket_is_and_has_its_folder() -> None:
    pod = pod_of(Deployment(F, "image", constraints=("zone=a", "nvidia.com/gpu=T4")), GPU)

    assert pod["nodeSelector"] == {"gpu": "yes", "zone": "a"}
    assert pod["priorityClassName"] == "p"
    assert pod["volumes"] == [
        {"name": "gpus", "hostPath": {"path": "/run/gpus", "type": "Directory"}}
    ]
    (container,) = pod["containers"]
    assert container["volumeMounts"] == [
        {"name": "gpus", "mountPath": "/run/gpus", "readOnly": True}
    ]
    names = {each["name"] for each in container["env"]}
    assert {"GPUFAAS_ADDRESS", "GPUFAAS_ENABLED"} <= names
    assert "PYTHONPATH" not in names


def test_values_of_variables_are_what_was_deployed() -> None:
    """The kubelet reads $(NAME) as another variable, and $$ as one $."""
    (container,) = pod_of(Deployment(F, "image", environment={"WORD": "a$$b $(HOME)"}))[
        "containers"
    ]
    assert {"name": "WORD", "value": "a$$$$b $$(HOME)"} in container["env"]


@pytest.mark.parametrize("injected", [{}, GPU])
def test_function_has_no_gpu_of_the_machine_whatever_it_or_its_image_says(
    injected: dict[str, str],
) -> None:
    own = {"CUDA_VISIBLE_DEVICES": "0", "NVIDIA_VISIBLE_DEVICES": "all"}
    (container,) = pod_of(Deployment(F, "image", environment=own), injected)["containers"]
    variables = {each["name"]: each["value"] for each in container["env"]}
    assert variables["CUDA_VISIBLE_DEVICES"] == ""
    assert variables["NVIDIA_VISIBLE_DEVICES"] == "void"


def test_gpu_functions_go_anywhere_where_no_label_is_named() -> None:
    settings = GatewaySettings(kubernetes_gpu_pod='{"nodeSelector": null, "tolerations": null}')
    made = manifest.manifest(Deployment(F, "image"), settings, GPU, MARKS, 1)
    assert not made["spec"]["template"]["spec"]["nodeSelector"]


def test_plain_function_has_no_more_than_it_asks_for() -> None:
    pod = pod_of(
        Deployment(
            F,
            "image",
            secrets=("key",),
            limits=Resources(memory="128m", cpu="0.5", gpu="1"),
            requests=Resources(memory="64Mi"),
            annotations={"com.gpufaas.enabled": "false", "com.gpufaas.timeout": "90s"},
        )
    )

    assert "nodeSelector" not in pod
    assert pod["automountServiceAccountToken"] is False
    assert pod["terminationGracePeriodSeconds"] == 90 + 3 + 1
    (container,) = pod["containers"]
    assert container["resources"] == {
        "limits": {"memory": str(128 << 20), "cpu": "500m"},
        "requests": {"memory": str(64 << 20)},
    }
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["volumeMounts"] == [
        {"name": "secrets", "mountPath": "/var/openfaas/secrets", "readOnly": True}
    ]


@pytest.mark.parametrize(
    ("deployment", "asked"),
    [
        (Deployment(F, "i", process="python runtime --gpu"), {"httpGet": "/_/ready"}),
        (
            Deployment(F, "i", annotations={"com.openfaas.ready.http.path": "/ok"}),
            {"httpGet": "/ok"},
        ),
        (Deployment(F, "i"), {"tcpSocket": None}),
    ],
)
def test_readiness_is_asked_as_the_image_answers(
    deployment: Deployment, asked: dict[str, str | None]
) -> None:
    (container,) = pod_of(deployment)["containers"]
    probe = container["readinessProbe"]
    assert {
        key: probe[key].get("path") for key in ("httpGet", "tcpSocket") if key in probe
    } == asked


@pytest.mark.parametrize(
    "deployment",
    [
        Deployment(FunctionId("openfaas-fn", "Upper"), "i"),
        Deployment(FunctionId("openfaas-fn", "under_scored"), "i"),
        Deployment(F, "i", limits=Resources(memory="much")),
        Deployment(F, "i", constraints=("zone!=a",)),
    ],
)
def test_deployment_that_no_cluster_takes_is_refused(deployment: Deployment) -> None:
    with pytest.raises(BadDeployment):
        manifest.check(deployment)


@pytest.mark.parametrize(
    "settings",
    [
        GatewaySettings(kubernetes_url="cluster"),
        GatewaySettings(kubernetes_name="not a label"),
        GatewaySettings(kubernetes_pull="often"),
        GatewaySettings(kubernetes_gpu_pod="[]"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: GatewaySettings) -> None:
    with pytest.raises(BadRequest):
        check_settings(settings)


@pytest.mark.parametrize(
    ("status", "trouble"),
    [
        ({"containerStatuses": [{"state": {"waiting": {"reason": "ContainerCreating"}}}]}, ""),
        (
            {
                "containerStatuses": [
                    {"state": {"waiting": {"reason": "ErrImagePull", "message": "no such"}}}
                ]
            },
            "ErrImagePull: no such",
        ),
        (
            {
                "containerStatuses": [
                    {
                        "state": {"running": {}},
                        "lastState": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}},
                    }
                ]
            },
            "it ended with status 137 (OOMKilled)",
        ),
        (
            {
                "conditions": [
                    {
                        "type": "PodScheduled",
                        "status": "False",
                        "reason": "Unschedulable",
                        "message": "no node",
                    }
                ]
            },
            "Unschedulable: no node",
        ),
    ],
)
def test_pod_says_why_it_is_not_ready(status: dict[str, Any], trouble: str) -> None:
    metadata = {"name": "f-1", "namespace": "openfaas-fn", "labels": {"faas_function": "f"}}
    assert pod_state({"metadata": metadata, "status": status}).trouble == trouble
