"""What the chart has made on a node, and how people use it."""

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.kit.engines.images.torch_image import fill_with_torch
from tests.kit.engines.kubernetes.helm import Helm
from tests.kit.engines.kubernetes.kubernetes_node import Json, KubernetesNode
from tests.kit.page.grey_picture import seen_classes
from tests.kit.places import ROOT
from tests.kit.waiting import PATIENCE_S, wait_until

OURS, FUNCTIONS = "openfaas", "openfaas-fn"
_COMPONENT = "app.kubernetes.io/component"
_SHELL_S = 300.0


class ChartStack:
    """The release `gpufaas` in the namespace `openfaas`; use it where Services are reached."""

    def __init__(self, node: KubernetesNode, helm: Helm, faas_cli: Path, folder: Path) -> None:
        self.node = node
        self._folder = folder
        self._programs = folder / "programs"
        self._programs.mkdir()
        kubectl = node.folder / "bin" / "kubectl"
        for name, path in (("helm", helm.path), ("faas-cli", faas_cli), ("kubectl", kubectl)):
            (self._programs / name).symlink_to(path)

    def have_images(self, archive: Path) -> None:
        """Import them, and link torch's files into the layer that is for them."""
        self.node.import_images(archive)
        archive.unlink()
        fill_with_torch(self.node.layers())

    def shell(self, script: str, *, stdin: str = "") -> str:
        """What a script prints that a person might type in the checkout."""
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=ROOT,
            env=self._environment(),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=_SHELL_S,
            check=False,
        )
        assert done.returncode == 0, f"{script}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    @contextmanager
    def in_background(self, line: str, port: int) -> Iterator[None]:
        """A command that goes on, once it listens at a port."""
        with (self._folder / "background.log").open("ab") as log:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {line}"],
                cwd=ROOT,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            wait_until(lambda: _listens(port), f"{line} listens")
            yield
        finally:
            process.kill()
            process.wait()

    @property
    def url(self) -> str:
        """Our gateway's, as pods of the cluster reach it."""
        service = self.node.get(f"/api/v1/namespaces/{OURS}/services/gpufaas-gateway")
        return f"http://{service['spec']['clusterIP']}:{service['spec']['ports'][0]['port']}"

    @property
    def password(self) -> str:
        words = f"kubectl --namespace {OURS} get secret gpufaas-login"
        return self.shell(f"{words} -o jsonpath='{{.data.basic-auth-password}}' | base64 --decode")

    def faas(self, *words: str, stdin: str = "") -> str:
        """What faas-cli prints, at our gateway's Service."""
        return self.shell(f"faas-cli {' '.join(words)} --gateway {self.url}", stdin=stdin)

    @property
    def stack_file(self) -> str:
        """The functions that were built."""
        return str(self._folder / "stack.yml")

    def scale(self, name: str, count: int) -> bool:
        """Ask for so many replicas of a function; False where the gateway is not reached."""
        said = {"serviceName": name, "replicas": count}
        try:
            answer = self._ask("POST", f"/system/scale-function/{name}", said)
        except httpx.TransportError:
            return False
        assert answer.status_code == httpx.codes.ACCEPTED, answer.text
        return True

    def replicas(self, name: str) -> int:
        """How many of it are ready; -1 where nobody says."""
        try:
            answer = self._ask("GET", f"/system/function/{name}")
        except httpx.TransportError:
            return -1
        return int(answer.json()["availableReplicas"]) if answer.is_success else -1

    def login(self) -> None:
        """Have faas-cli know the password at the Service."""
        self.faas("login", "--password-stdin", stdin=self.password)

    def call(self, name: str, body: bytes | str = b"", **how: Any) -> httpx.Response:
        with httpx.Client(base_url=self.url, timeout=PATIENCE_S) as http:
            return http.post(f"/function/{name}", content=body, **how)

    def classes(self) -> list[int]:
        """What the function on a GPU sees in a grey picture; none where it does not answer."""
        return seen_classes(self.call)

    def held_models(self) -> list[Json]:
        """The models that GPUs hold, as the leading scheduler says."""
        said = self.command("models", "--json")
        return list(json.loads(said) or [])

    def command(self, *words: str) -> str:
        """What one of our commands prints in a scheduler's pod."""
        asked = ("--scheduler", self.schedulers, "--secret-file", "/etc/gpufaas/cluster/secret")
        pod = self.pods("scheduler")[0]["metadata"]["name"]
        where = ("exec", f"--namespace={OURS}", pod, "--", "gpufaas")
        return self.node.kubectl(*where, *words, *asked)

    @property
    def schedulers(self) -> str:
        """Both, by their names."""
        return ",".join(
            f"http://gpufaas-scheduler-{number}.gpufaas-scheduler.{OURS}.svc.cluster.local:7700"
            for number in range(2)
        )

    def pods(self, component: str) -> list[Json]:
        """Those of a part of ours."""
        return self.node.items(f"/api/v1/namespaces/{OURS}/pods", **{_COMPONENT: component})

    def function_pods(self, name: str) -> list[Json]:
        """Those of a function that are not about to end."""
        found = self.node.items(f"/api/v1/namespaces/{FUNCTIONS}/pods", faas_function=name)
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def kill_pod(self, name: str) -> None:
        """Have a pod end at once, with its uid noted by whoever waits for the next one."""
        self.node.kubectl(
            "delete", "pod", name, f"--namespace={OURS}", "--force", "--grace-period=0"
        )

    def is_ready(self, component: str, count: int, *, without: str = "") -> bool:
        """Whether so many pods of a part are ready, and none is that of this uid."""
        pods = self.pods(component)
        uids = {pod["metadata"]["uid"] for pod in pods}
        return len(pods) == count and without not in uids and all(map(_is_ready, pods))

    def said(self, component: str) -> str:
        """What the pods of a part have printed of late."""
        chosen = (f"--namespace={OURS}", f"--selector={_COMPONENT}={component}")
        return self.node.kubectl("logs", *chosen, "--tail=30", "--prefix")

    @contextmanager
    def called_all_the_while(self, name: str) -> Iterator["CallsMeanwhile"]:
        """Calls of a function, one after another, as long as this lasts."""
        found = CallsMeanwhile(self.url, name)
        thread = threading.Thread(target=found.run)
        thread.start()
        try:
            yield found
        finally:
            found.over.set()
            thread.join()

    def _ask(self, method: str, path: str, said: object = None) -> httpx.Response:
        with httpx.Client(
            base_url=self.url, timeout=PATIENCE_S, auth=("admin", self.password)
        ) as http:
            return http.request(method, path, json=said)

    def _environment(self) -> dict[str, str]:
        return {
            "PATH": f"{self._programs}:{os.defpath}:/usr/sbin:/sbin",
            "HOME": str(self._folder),
            "KUBECONFIG": str(self.node.files.admin),
            "OPENFAAS_CONFIG": str(self._folder),
        }


@dataclass
class CallsMeanwhile:
    """What was answered, in order; what was not, with its reason."""

    url: str
    name: str
    answers: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        with httpx.Client(base_url=self.url, timeout=PATIENCE_S) as http:
            while not self.over.is_set():
                try:
                    answer = http.post(f"/function/{self.name}", content=b"you")
                except httpx.TransportError as error:
                    self.failures.append(repr(error))
                    continue
                kept = self.answers if answer.is_success else self.failures
                kept.append(answer.text)


def _is_ready(pod: Json) -> bool:
    conditions = pod["status"].get("conditions") or []
    leaving = "deletionTimestamp" in pod["metadata"]
    return not leaving and any(
        each["type"] == "Ready" and each["status"] == "True" for each in conditions
    )


def _listens(port: int) -> bool:
    try:
        httpx.get(f"http://127.0.0.1:{port}/healthz", timeout=5)
    except httpx.TransportError:
        return False
    return True
