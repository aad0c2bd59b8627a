"""What the chart tells our programs they understand, and addresses lead to each other."""

import argparse
import hashlib
import json
import re
import ssl
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from common.addresses import TcpAddress, TlsAddress, UnixAddress, parse_address
from common.numerals import parse_size
from gpufaas.commands import gateway, gpu_manager, scheduler, status
from gpufaas.options.configuration import AllSettings, read_settings
from tests.integration.helm.chart_values import FOLDER, VALUES
from tests.kit.engines.kubernetes.helm import BUILD_S, NAMESPACE, Helm, Pod, Rendered

pytestmark = pytest.mark.timeout(BUILD_S + 60)

PROGRAMS = {"gateway": gateway, "scheduler": scheduler, "gpu-manager": gpu_manager, "test": status}
THEIR_FINGERPRINT = "0123456789abcdef" * 4
POD_IP, HOST_IP = "10.1.2.3", "10.9.9.9"


def options_of(pod: Pod) -> argparse.Namespace:
    """Its command line as our command reads it; a wrong one ends the test."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    commands = parser.add_subparsers(dest="command", required=True)
    PROGRAMS[pod.component].add_parser(commands)
    name = pod.owner["metadata"]["name"]
    words = pod.arguments(POD_NAME=f"{name}-0", NODE_NAME="n1", POD_IP=POD_IP, HOST_IP=HOST_IP)
    assert pod.container["command"] == ["gpufaas"]
    return parser.parse_args(words)


def settings_of(rendered: Rendered, component: str, folder: Path) -> AllSettings:
    """The pod's gpufaas.toml as its program reads it."""
    pod = rendered.pod(component)
    found = pod.file(options_of(pod).config)
    assert found is not None, component
    text = rendered.one("ConfigMap", found[1])["data"][found[2]]
    path = folder / f"{component}.toml"
    path.write_text(text)
    return read_settings(str(path), {}, {})


def ours(rendered: Rendered) -> Iterator[Pod]:
    """Those that run a program of ours."""
    return (pod for pod in rendered.pods() if pod.component in PROGRAMS)


def test_command_lines_are_understood(rendered: Rendered) -> None:
    assert {pod.component for pod in ours(rendered)} == set(PROGRAMS)
    for pod in ours(rendered):
        options_of(pod)


def test_settings_are_understood(rendered: Rendered, tmp_path: Path) -> None:
    decided = settings_of(rendered, "scheduler", tmp_path)
    served = settings_of(rendered, "gateway", tmp_path)

    assert decided.scheduler.listen == f"0.0.0.0:{rendered.pod('scheduler').ports['http']}"
    assert served.gateway.listen == f"0.0.0.0:{rendered.pod('gateway').ports['http']}"
    assert served.gateway.provider in {"upstream", "kubernetes"}
    grace_s = rendered.pod("gateway").spec["terminationGracePeriodSeconds"]
    assert grace_s >= served.gateway.drain_s + 10


def test_settings_say_what_values_wish(helm: Helm, tmp_path: Path) -> None:
    by_name = {path.stem: path for path in VALUES}
    far = helm.template(by_name["existing-etcd"])
    alone = helm.template(by_name["standalone"])

    decided = settings_of(far, "scheduler", tmp_path)
    assert (decided.policy, decided.parameters) == ("netgain", {"patience": 3})
    assert (decided.scheduler.max_waiting, decided.scheduler.attach_grace_s) == (20_000, 7.5)
    assert len(decided.etcd.endpoints) == 3
    assert (decided.etcd.user, decided.etcd.prefix) == ("gpufaas", "/gpufaas/one/")
    served = settings_of(alone, "gateway", tmp_path).gateway
    assert (served.role, served.upstream_url) == ("gateway", "http://faas-netes.elsewhere:8081/")
    assert (served.upstream_user, served.timeout_s, served.drain_s) == ("", 120.0, 90.0)
    assert (served.metrics_auth, served.callback_allowed) == (True, ("10.0.0.0/8",))
    usual = settings_of(helm.template(), "gateway", tmp_path).gateway
    assert (usual.role, usual.upstream_user) == ("provider", "admin")


def test_gateway_that_runs_functions_says_how(helm: Helm, tmp_path: Path) -> None:
    by_name = {path.stem: path for path in VALUES}
    alone = settings_of(helm.template(by_name["alone"]), "gateway", tmp_path).gateway
    found = helm.template(by_name["managed"], "gpuManager.hostSocket.enabled=true")
    managed = settings_of(found, "gateway", tmp_path).gateway

    assert options_of(found.pod("gateway")).manager == "unix:/run/gpufaas/node.sock"
    assert (alone.provider, alone.role, alone.upstream_url) == ("kubernetes", "gateway", "")
    assert (alone.kubernetes_namespaces, alone.kubernetes_gpu_pod) == (("openfaas-fn",), "")
    assert (managed.kubernetes_namespaces, managed.kubernetes_pull) == ((), "Always")
    assert managed.kubernetes_pull_secrets == ("theirs-functions",)
    assert json.loads(managed.kubernetes_gpu_pod) == {
        "nodeSelector": {"nvidia.com/gpu.present": "true"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    }


def test_emulated_gpus_are_on_every_node(helm: Helm) -> None:
    """Maps of values are merged: an empty one would leave the usual label in force."""
    pod = helm.template(FOLDER / "emulated.yaml").pod("gpu-manager")
    assert "nodeSelector" not in pod.spec
    assert "tolerations" not in pod.spec


def test_all_processes_log_alike_and_trace_alike(helm: Helm, tmp_path: Path) -> None:
    found = helm.template(FOLDER / "everything.yaml")

    served = settings_of(found, "gateway", tmp_path)
    assert served.log_format == settings_of(found, "scheduler", tmp_path).log_format == "json"
    assert options_of(found.pod("gpu-manager")).log_format == "json"
    assert (served.tracing.endpoint, served.tracing.ratio) == (
        "http://collector.tracing:4318",
        0.25,
    )
    assert settings_of(found, "scheduler", tmp_path).tracing == served.tracing


def test_files_that_are_named_are_mounted(rendered: Rendered, tmp_path: Path) -> None:
    decided = settings_of(rendered, "scheduler", tmp_path)
    served = settings_of(rendered, "gateway", tmp_path)
    options = options_of(rendered.pod("gpu-manager"))
    login = served.gateway.secrets_dir
    wanted = {
        "scheduler": [
            decided.scheduler.secret_file,
            decided.tracing.headers_file,
            *(getattr(decided.etcd, name) for name in ("ca", "cert", "key", "password_file")),
        ],
        "gateway": [
            served.scheduler.secret_file,
            served.gateway.upstream_password_file,
            f"{login}/basic-auth-user",
            f"{login}/basic-auth-password",
            *(getattr(served.gateway, f"queue_{name}_file") for name in ("password", "ca")),
            served.tracing.headers_file,
        ],
        "gpu-manager": [options.secret_file, options.certificate or "", options.key or ""],
        "test": [options_of(rendered.pod("test")).secret_file],
    }
    for component, paths in wanted.items():
        for path in filter(None, paths):
            assert rendered.pod(component).file(path), (component, path)


def test_folders_that_are_written_to_can_be(rendered: Rendered, tmp_path: Path) -> None:
    served = settings_of(rendered, "gateway", tmp_path)
    options = options_of(rendered.pod("gpu-manager"))
    socket = parse_address(options.listen[0])
    assert isinstance(socket, UnixAddress)
    wanted = {
        "gateway": [served.gateway.state_dir, "/tmp"],
        "scheduler": ["/tmp"],
        "gpu-manager": [str(socket.path.parent), "/tmp", *filter(None, [options.spill])],
    }
    for component, folders in wanted.items():
        mounts = rendered.pod(component).container["volumeMounts"]
        open_ = {each["mountPath"] for each in mounts if not each.get("readOnly")}
        assert set(folders) <= open_, component


def test_schedulers_are_found_under_their_own_names(rendered: Rendered, tmp_path: Path) -> None:
    owner = rendered.pod("scheduler").owner
    options = options_of(rendered.pod("scheduler"))
    domain = "k8s.example" if owner["metadata"]["name"].startswith("gpus") else "cluster.local"
    urls = [
        f"http://{name}-{number}.{service}.{NAMESPACE}.svc.{domain}:7700"
        for name, service in [(owner["metadata"]["name"], owner["spec"]["serviceName"])]
        for number in range(owner["spec"]["replicas"])
    ]

    assert vars(options)["scheduler.advertise"] == urls[0]
    assert vars(options)["scheduler.name"] == f"{owner['metadata']['name']}-0"
    for component, option in (
        ("gateway", "urls"),
        ("gpu-manager", "scheduler"),
        ("test", "scheduler"),
    ):
        assert getattr(options_of(rendered.pod(component)), option).split(",") == urls
    assert rendered.one("Service", owner["spec"]["serviceName"])["spec"]["clusterIP"] == "None"
    decided = settings_of(rendered, "scheduler", tmp_path)
    etcd = [pod for pod in rendered.pods() if pod.component == "etcd"]
    for pod in etcd:
        hosts = [urlsplit(url).hostname or "" for url in decided.etcd.endpoints]
        assert len(hosts) == pod.owner["spec"]["replicas"]
        assert all(urlsplit(url).port == pod.ports["client"] for url in decided.etcd.endpoints)
        service = pod.owner["spec"]["serviceName"]
        assert [host.split(".")[:2] for host in hosts] == [
            [f"{service}-{number}", service] for number in range(len(hosts))
        ]


def test_functions_are_sent_to_where_gpu_managers_listen(rendered: Rendered) -> None:
    pod = rendered.pod("gpu-manager")
    options = options_of(pod)
    listening = [parse_address(text) for text in options.listen]
    address = parse_address(options_of(rendered.pod("gateway")).manager)
    service = rendered.one("Service", pod.owner["metadata"]["name"])["spec"]

    assert isinstance(address, TcpAddress | TlsAddress)
    assert type(listening[1]) is type(address)
    assert {port["name"]: port["port"] for port in service["ports"]}["functions"] == address.port
    assert address.host.startswith(f"{pod.owner['metadata']['name']}.{NAMESPACE}.svc.")
    assert service["sessionAffinity"] == "ClientIP"
    assert f":{pod.ports['functions']}" in options.listen[1]
    assert options.metrics == f"0.0.0.0:{pod.ports['metrics']}"
    elsewhere = parse_address(options.advertise[-1])
    opened = {port.get("hostPort") for port in pod.container["ports"]}
    assert isinstance(elsewhere, type(address))
    assert (elsewhere.host == HOST_IP) == (address.port in opened)
    assert elsewhere.host in {HOST_IP, POD_IP}


def test_functions_are_told_the_socket_when_it_is_mounted(helm: Helm) -> None:
    found = helm.template(
        None, *(f"gpuManager.hostSocket.{key}=true" for key in ("enabled", "mounted"))
    )

    assert options_of(found.pod("gateway")).manager == "unix:/run/gpufaas/node.sock"
    assert options_of(found.pod("gpu-manager")).advertise[0] == "unix:/run/gpufaas/node.sock"
    (volume,) = [
        each for each in found.pod("gpu-manager").spec["volumes"] if each["name"] == "socket"
    ]
    assert volume["hostPath"]["path"] == "/run/gpufaas"


def test_functions_know_the_certificate_that_they_are_shown(rendered: Rendered) -> None:
    address = parse_address(options_of(rendered.pod("gateway")).manager)
    if not isinstance(address, TlsAddress):
        assert options_of(rendered.pod("gpu-manager")).certificate is None
        return
    found = rendered.pod("gpu-manager").file("/etc/gpufaas/node/tls.crt")
    assert found is not None
    if found[1].startswith("theirs-"):
        assert address.fingerprint == THEIR_FINGERPRINT
        return
    shown = b64decode(rendered.one("Secret", found[1])["data"][found[2]]).decode()
    assert address.fingerprint == hashlib.sha256(ssl.PEM_cert_to_DER_cert(shown)).hexdigest()


def test_sizes_are_the_same_to_kubernetes_and_to_us(rendered: Rendered) -> None:
    pod = rendered.pod("gpu-manager")
    options = options_of(pod)
    limit = parse_size(pod.container["resources"]["limits"]["memory"] + "B")

    assert parse_size(options.store_memory) < limit
    spill = [each for each in pod.spec["volumes"] if each["name"] == "spill"]
    assert bool(spill) == bool(options.spill)
    for volume in spill:
        if "emptyDir" in volume:
            assert parse_size(volume["emptyDir"]["sizeLimit"] + "B") == parse_size(
                options.spill_size
            )


def test_the_provider_is_where_the_settings_say(rendered: Rendered, tmp_path: Path) -> None:
    url = urlsplit(settings_of(rendered, "gateway", tmp_path).gateway.upstream_url)
    made = [
        each
        for each in rendered.of_kind("Service")
        if each["metadata"]["name"].endswith("-upstream")
    ]

    if url.hostname in {None, "faas-netes.elsewhere"}:
        assert not made
        return
    (service,) = made
    where = service["metadata"]
    assert (url.hostname or "").startswith(f"{where['name']}.{where['namespace']}.svc.")
    assert url.port == service["spec"]["ports"][0]["port"]


def test_gpus_get_in_as_the_values_say(rendered: Rendered) -> None:
    pod = rendered.pod("gpu-manager")
    variables = {each["name"]: each.get("value") for each in pod.container["env"]}
    claims = pod.container["resources"]["limits"].get("nvidia.com/gpu")
    mounted = any(
        each["mountPath"].startswith("/var/run/nvidia") for each in pod.container["volumeMounts"]
    )
    ways = [variables.get("NVIDIA_VISIBLE_DEVICES") == "all", claims is not None, mounted]

    if options_of(pod).devices.startswith("cpu"):
        assert not any(ways)
        assert "runtimeClassName" not in pod.spec
    else:
        assert ways.count(True) == 1
        assert pod.spec["runtimeClassName"] == "nvidia"


def test_a_change_of_settings_restarts_who_reads_them(helm: Helm) -> None:
    def checksums(*sets: str) -> dict[str, str]:
        found = helm.template(None, *sets)
        return {
            pod.component: pod.metadata.get("annotations", {}).get("checksum/config", "")
            for pod in found.pods()
        }

    usual = checksums()
    assert re.fullmatch(r"[0-9a-f]{64}", usual["gateway"])
    other = checksums("scheduler.logLevel=debug")
    assert other["scheduler"] != usual["scheduler"]
    assert other["gateway"] == usual["gateway"]
