"""One real Kubernetes node of a test's own, in name spaces of its own, gone without a trace.

Its pods are on a plain bridge: their names are resolved, their Services answer, and nobody enforces
a NetworkPolicy. Its containers come of images that are imported; nothing is pulled.
"""

import json
import os
import signal
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from tests.kit import needs
from tests.kit.engines.kubernetes import node_programs
from tests.kit.engines.kubernetes.node_files import CLASS, NODE, PAUSE, SERVICES, NodeFiles
from tests.kit.engines.kubernetes.small_images import program_image
from tests.kit.engines.own_spaces import OwnSpaces
from tests.kit.waiting import PATIENCE_S, wait_until

_PREFIX = "gpufaas-kubernetes-"
_PROGRAMS = ("containerd", "coredns", "etcd", "kube", "runc")
# Nothing of what programs keep there is to be seen on this machine.
_HIDDEN = ("/run", "/var/lib", "/var/log")
_ETCD = "http://127.0.0.1:2379"
_KUBECTL_S = 120.0
_VOLUMES = 8

Json = dict[str, Any]


class KubernetesNode:
    """A cluster of one node; `part` names in what follows are those of `_commands`."""

    def __init__(self) -> None:
        node_programs.check_machine()
        self._kubernetes = node_programs.program("kubernetes")
        self._coredns = node_programs.program("coredns")
        self._etcd = node_programs.etcd_program()
        self._spaces = OwnSpaces(_PREFIX, _PROGRAMS)
        self.folder = self._spaces.folder
        self.files = NodeFiles(self.folder, self._spaces.address, self._spaces.name)
        self._parts: dict[str, subprocess.Popen[bytes]] = {}
        self._trust: ssl.SSLContext | None = None

    def make(self) -> None:
        """Have it ready for pods, which find volumes of a default storage class."""
        try:
            self._spaces.make()
            self._prepare()
            for part in self._commands():
                self.start(part)
                self._wait_for(part)
            self._make_volumes()
            account = "/api/v1/namespaces/default/serviceaccounts/default"
            wait_until(lambda: self.get(account), "pods have an account")
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Leave nothing: no process, container, mount, bridge, firewall rule, cgroup or file."""
        self._spaces.end()
        for process in self._parts.values():
            process.wait()

    def start(self, part: str) -> None:
        """Start one of its programs."""
        words = self._spaces.command(*self._commands()[part], mounts=True)
        with (self.folder / "log" / part).open("ab") as log:
            self._parts[part] = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def kill(self, part: str) -> None:
        """End one of its programs at once."""
        self._parts[part].send_signal(signal.SIGKILL)
        self._parts[part].wait()

    def restart(self, part: str) -> None:
        """Start a part that was killed, and wait until it is ready."""
        self.start(part)
        self._wait_for(part)

    def run(self, *words: str) -> str:
        """What a command prints that runs where the node's programs do."""
        return self._spaces.run(*words)

    def inside(self) -> AbstractContextManager[None]:
        """Have this thread, and what it starts, reach pods and Services."""
        return self._spaces.inside()

    def kubectl(self, *words: str, stdin: str = "", within_s: float = _KUBECTL_S) -> str:
        """What kubectl prints; CalledProcessError's text has what it said where it fails."""
        command = [str(self.folder / "bin/kubectl"), f"--kubeconfig={self.files.admin}", *words]
        done = subprocess.run(
            command,
            input=stdin,
            env={"PATH": os.defpath, "HOME": str(self.folder)},
            capture_output=True,
            text=True,
            timeout=within_s,
            check=False,
        )
        if done.returncode:
            raise KubectlFailed(f"kubectl {' '.join(words)}: {done.stdout}{done.stderr}")
        return done.stdout

    def apply(self, *objects: Json) -> None:
        """Have these objects in the cluster."""
        listed = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        self.kubectl("apply", "--filename=-", stdin=json.dumps(listed))

    def get(self, path: str) -> Json:
        """What the API server answers there; its answer to what is not there is empty."""
        try:
            with urllib.request.urlopen(
                self.files.url + path, timeout=10, context=self._trusting()
            ) as answer:
                found: Json = json.load(answer)
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise
            return {}
        return found

    def items(self, path: str, **labels: str) -> list[Json]:
        """The objects in a list."""
        chosen = ",".join(f"{name}={value}" for name, value in labels.items())
        query = f"?labelSelector={chosen}" if chosen else ""
        return list(self.get(path + query).get("items") or [])

    def import_images(self, archive: Path) -> None:
        """Have the images of an archive (of `docker save`)."""
        self.ctr("images", "import", str(archive))

    def ctr(self, *words: str) -> str:
        """What containerd's own client prints about what is the kubelet's."""
        named = (f"--address={self.files.containerd}", "--namespace=k8s.io")
        return self._spaces.run(str(needs.command("ctr", "containerd")), *named, *words)

    def layers(self) -> Iterator[Path]:
        """The folders of the files of all layers of its images."""
        kept = self.folder / "containerd/root/io.containerd.snapshotter.v1.overlayfs/snapshots"
        return (each / "fs" for each in kept.iterdir())

    def said(self, part: str) -> str:
        """What one of its programs has said of late."""
        text = (self.folder / "log" / part).read_text(errors="replace")
        return "\n".join(text.splitlines()[-15:])

    def _prepare(self) -> None:
        self.files.write()
        for name in node_programs.PARTS:
            (self.folder / "bin" / name).symlink_to(self._kubernetes)
        (self.folder / "bin" / "coredns").symlink_to(self._coredns)
        for place in _HIDDEN:
            self._spaces.run("mount", "-t", "tmpfs", "tmpfs", place)
        self._spaces.run("sh", "-c", "echo 1 >/proc/sys/net/ipv4/ip_forward")

    def _commands(self) -> Mapping[str, Sequence[str]]:
        """In the order in which they are started."""
        files, programs = self.files, self.folder / "bin"
        settings = f"--config={self.folder}"
        here = "--bind-address=127.0.0.1"
        return {
            "etcd": _words(self._etcd, *_etcd_options(self.folder)),
            "apiserver": _words(programs / "kube-apiserver", *_api_options(files)),
            "controllers": _words(
                *(programs / "kube-controller-manager", here, "--leader-elect=false"),
                f"--kubeconfig={self.folder}/controllers.conf",
                *("--use-service-account-credentials", f"--root-ca-file={files.pki}/ca.crt"),
                f"--service-account-private-key-file={files.pki}/accounts.key",
            ),
            "scheduler": _words(
                *(programs / "kube-scheduler", here, "--leader-elect=false"),
                f"--kubeconfig={self.folder}/scheduler.conf",
            ),
            "containerd": _words(
                needs.command("containerd", "containerd"), f"{settings}/containerd.toml"
            ),
            "kubelet": _words(
                *(programs / "kubelet", f"{settings}/kubelet.yaml", f"--hostname-override={NODE}"),
                *(f"--kubeconfig={self.folder}/kubelet.conf", f"--node-ip={files.address}"),
                f"--root-dir={self.folder}/kubelet",
            ),
            "proxy": _words(programs / "kube-proxy", f"{settings}/proxy.yaml"),
            "names": _words(programs / "coredns", "-conf", self.folder / "Corefile"),
        }

    def _wait_for(self, part: str) -> None:
        ready = {
            "apiserver": lambda: self._answers("/readyz"),
            "containerd": self.files.containerd.exists,
            "kubelet": self.is_ready,
        }
        if part in ready:
            wait_until(
                lambda: self._parts[part].poll() is not None or ready[part](),
                f"{part} is ready",
                within_s=PATIENCE_S,
                instead=lambda: self.said(part),
            )
        assert self._parts[part].poll() is None, f"{part} has ended: {self.said(part)}"
        if part == "containerd":
            self.import_images(self._pause())

    def is_ready(self) -> bool:
        """Whether the node takes pods, as its kubelet reports."""
        conditions = self.get(f"/api/v1/nodes/{NODE}").get("status", {}).get("conditions") or []
        return {"type": "Ready", "status": "True"} in [
            {key: each[key] for key in ("type", "status")} for each in conditions
        ]

    def _answers(self, path: str) -> bool:
        try:
            asked = self.files.url + path
            with urllib.request.urlopen(asked, timeout=5, context=self._trusting()) as answer:
                return bool(answer.status == 200)
        except OSError:  # an HTTPError is one
            return False

    def _trusting(self) -> ssl.SSLContext:
        if self._trust is None:
            pki = self.files.pki
            self._trust = ssl.create_default_context(cafile=pki / "ca.crt")
            self._trust.load_cert_chain(pki / "admin.crt", pki / "admin.key")
        return self._trust

    def _pause(self) -> Path:
        made = self.folder / "pause.tar"
        busybox = needs.command("busybox", "busybox-static")
        program_image(made, PAUSE, busybox, "sleep", "100000000")
        return made

    def _make_volumes(self) -> None:
        """As many as tests claim, of the one storage class, which is the default."""
        volumes = []
        for number in range(_VOLUMES):
            folder = self.files.volumes / str(number)
            folder.mkdir()
            volumes.append(_volume(f"volume-{number}", folder))
        self.apply(_STORAGE_CLASS, *volumes)


class KubectlFailed(Exception):
    """The text has what kubectl said."""


@contextmanager
def kubernetes_node() -> Iterator[KubernetesNode]:
    """A node for as long as this lasts; fixtures of tests are made of it."""
    found = KubernetesNode()
    found.make()
    try:
        yield found
    finally:
        found.end()


def _words(*words: str | Path) -> list[str]:
    return [str(word) for word in words]


def _etcd_options(folder: Path) -> Sequence[str]:
    peers = "http://127.0.0.1:2380"
    return (
        *(f"--data-dir={folder}/etcd", "--unsafe-no-fsync", "--log-level=warn"),
        *(f"--listen-client-urls={_ETCD}", f"--advertise-client-urls={_ETCD}"),
        *(f"--listen-peer-urls={peers}", f"--initial-advertise-peer-urls={peers}"),
        f"--initial-cluster=default={peers}",
    )


def _api_options(files: NodeFiles) -> Sequence[str]:
    pki = files.pki
    return (
        *(f"--etcd-servers={_ETCD}", "--bind-address=0.0.0.0"),
        *(f"--advertise-address={files.address}", f"--service-cluster-ip-range={SERVICES}"),
        *(f"--client-ca-file={pki}/ca.crt", f"--tls-cert-file={pki}/apiserver.crt"),
        *(f"--tls-private-key-file={pki}/apiserver.key", "--authorization-mode=Node,RBAC"),
        *(f"--kubelet-client-certificate={pki}/admin.crt", "--allow-privileged"),
        *(f"--kubelet-client-key={pki}/admin.key", f"--service-account-issuer={files.url}"),
        *(f"--service-account-key-file={pki}/accounts.key",),
        *(f"--service-account-signing-key-file={pki}/accounts.key",),
        "--kubelet-preferred-address-types=InternalIP",
    )


def _volume(name: str, folder: Path) -> Json:
    here = {"key": "kubernetes.io/hostname", "operator": "In", "values": [NODE]}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "capacity": {"storage": "100Gi"},
            "local": {"path": str(folder)},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [here]}]}},
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": CLASS,
        },
    }


_STORAGE_CLASS: Json = {
    "apiVersion": "storage.k8s.io/v1",
    "kind": "StorageClass",
    "metadata": {
        "name": CLASS,
        "annotations": {"storageclass.kubernetes.io/is-default-class": "true"},
    },
    "provisioner": "kubernetes.io/no-provisioner",
    "volumeBindingMode": "WaitForFirstConsumer",
}
