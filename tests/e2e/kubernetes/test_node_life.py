"""Pods of a Kubernetes node find each other by name; a node's spaces go with whoever made them."""

import contextlib
import http.client
import json
import subprocess
import sys
from pathlib import Path

from tests.e2e.kubernetes.web_image import WEB, web_image
from tests.kit import needs
from tests.kit.engines.kubernetes.kubernetes_node import Json, KubernetesNode
from tests.kit.engines.space_traces import traces
from tests.kit.places import ROOT
from tests.kit.waiting import wait_until

_ASKS = """
while :; do /busybox nslookup web.default.svc.cluster.local; /busybox sleep 1; done
"""
_TO_BE_KILLED = """
import signal, subprocess
from tests.kit.engines.own_spaces import OwnSpaces
spaces = OwnSpaces("gpufaas-spaces-", [])
spaces.make()
subprocess.Popen(spaces.command("tail", "--follow", str(spaces.folder / "holder")))
print(spaces.name, flush=True)
signal.pause()
"""


def pod(name: str, *words: str) -> Json:
    """One that runs these words of busybox."""
    command = {"command": ["/busybox", *words]} if words else {}
    container = {"name": "one", "image": WEB, "imagePullPolicy": "Never", **command}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {"containers": [container], "restartPolicy": "Never"},
    }


def test_pods_find_a_service_by_its_name(node: KubernetesNode, tmp_path: Path) -> None:
    web_image(node, tmp_path, WEB)
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "web"},
        "spec": {"selector": {"app": "web"}, "ports": [{"port": 80, "targetPort": 8080}]},
    }
    node.apply(pod("web"), service, pod("asks", "sh", "-c", _ASKS))

    def phase(name: str) -> str:
        found = node.get(f"/api/v1/namespaces/default/pods/{name}")
        return str(found.get("status", {}).get("phase"))

    wait_until(lambda: phase("web") == phase("asks") == "Running", "both run")
    address = node.get("/api/v1/namespaces/default/services/web")["spec"]["clusterIP"]
    wait_until(
        lambda: f"Address: {address}" in node.kubectl("logs", "asks"),
        "a pod finds the Service by its name",
        instead=lambda: json.dumps(node.items("/api/v1/namespaces/default/pods"))[-2000:],
    )
    with node.inside():  # its rules are made some time after its name is known
        wait_until(lambda: _status(address) == http.HTTPStatus.NOT_FOUND, "the Service answers")
    node.kubectl("delete", "service/web", "pod/web", "pod/asks", "--wait=false")


def _status(address: str) -> int:
    """With which status a web server answers there; 0 where none does."""
    with contextlib.closing(http.client.HTTPConnection(address, timeout=10)) as asking:
        try:
            asking.request("GET", "/nothing")
            return asking.getresponse().status
        except (OSError, http.client.HTTPException):
            return 0


def test_nothing_is_left_of_name_spaces_when_the_test_in_them_is_killed() -> None:
    needs.root()
    command = [sys.executable, "-c", _TO_BE_KILLED]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        name = process.stdout.readline().strip()
        wait_until(lambda: str(traces(name, ["tail"])).count("process ") == 2, "both run in there")
        process.kill()
    wait_until(lambda: not traces(name, ["tail"]), "nothing is left")
