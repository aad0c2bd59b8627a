"""Certificates and settings of a Kubernetes node, all in one folder."""

import json
from collections.abc import Mapping
from pathlib import Path

from tests.kit import needs
from tests.kit.engines.kubernetes.node_programs import CNI_PLUGINS
from tests.kit.engines.space_traces import run

NODE = "n1"
PODS, SERVICES = "10.244.0.0/24", "10.96.0.0/16"
PAUSE = "localhost/pause:1"
CLASS = "local"
_API = "10.96.0.1"  # the first address of the Services, which is that of the API server
_DAYS = "30"


class NodeFiles:
    """The folder of one node, which answers at `address`."""

    def __init__(self, folder: Path, address: str, cgroup: str) -> None:
        self.folder = folder
        self.address = address
        self.url = f"https://{address}:6443"
        self.containerd = folder / "containerd.sock"
        self.admin = folder / "admin.conf"
        self.pki = folder / "pki"
        self.volumes = folder / "volumes"
        self._cgroup = cgroup

    def write(self) -> None:
        """Everything that the programs read."""
        for name in ("pki", "log", "etcd", "containerd", "kubelet", "cni", "volumes", "bin"):
            (self.folder / name).mkdir()
        self._certificates()
        self._text("resolv.conf", Path("/etc/resolv.conf").read_text())
        for name, settings in (
            ("kubelet.yaml", self._kubelet()),
            ("proxy.yaml", self._proxy()),
            ("cni/10.conflist", self._network()),
        ):
            self._text(name, json.dumps(settings))
        self._text("containerd.toml", self._containerd())
        self._text("Corefile", self._names())

    def sign(self, name: str, subject: str, *known_as: str) -> None:
        """A key and a certificate of the node's authority."""
        key, request, made = (self.pki / f"{name}.{end}" for end in ("key", "csr", "crt"))
        options = ("-newkey", "rsa:2048", "-nodes", "-subj", subject)
        openssl("req", *options, "-keyout", key, "-out", request)
        names = self.pki / f"{name}.names"
        names.write_text(f"subjectAltName={','.join(known_as) or 'DNS:none'}")
        authority = ("-CA", self.pki / "ca.crt", "-CAkey", self.pki / "ca.key", "-CAcreateserial")
        how = ("-days", _DAYS, "-extfile", names)
        openssl("x509", "-req", "-in", request, *authority, "-out", made, *how)

    def _certificates(self) -> None:
        authority = ("-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=ca", "-days", _DAYS)
        openssl("req", *authority, "-keyout", self.pki / "ca.key", "-out", self.pki / "ca.crt")
        openssl("genrsa", "-out", self.pki / "accounts.key", "2048")
        own = (f"IP:{self.address}", "IP:127.0.0.1")
        hosts = ("kubernetes", "kubernetes.default", "kubernetes.default.svc")
        self.sign(
            *("apiserver", "/CN=apiserver", f"IP:{_API}", *own),
            *(f"DNS:{name}" for name in (*hosts, "kubernetes.default.svc.cluster.local")),
        )
        self.sign("kubelet", f"/O=system:nodes/CN=system:node:{NODE}", f"DNS:{NODE}", *own)
        for name, subject in (
            ("admin", "/O=system:masters/CN=admin"),
            ("controllers", "/CN=system:kube-controller-manager"),
            ("scheduler", "/CN=system:kube-scheduler"),
            ("proxy", "/CN=system:kube-proxy"),
        ):
            self.sign(name, subject)
        for name in ("admin", "kubelet", "controllers", "scheduler", "proxy"):
            self._text(f"{name}.conf", json.dumps(self._kubeconfig(name)))

    def _kubeconfig(self, name: str) -> Mapping[str, object]:
        pair = {
            "client-certificate": str(self.pki / f"{name}.crt"),
            "client-key": str(self.pki / f"{name}.key"),
        }
        cluster = {"server": self.url, "certificate-authority": str(self.pki / "ca.crt")}
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "here", "cluster": cluster}],
            "users": [{"name": name, "user": pair}],
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": name}}],
            "current-context": "here",
        }

    def _kubelet(self) -> Mapping[str, object]:
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "authentication": {
                "x509": {"clientCAFile": str(self.pki / "ca.crt")},
                "anonymous": {"enabled": False},
            },
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self._cgroup}",
            "clusterDNS": [self.address],
            "clusterDomain": "cluster.local",
            "containerRuntimeEndpoint": f"unix://{self.containerd}",
            "evictionHard": {
                "memory.available": "100Mi",
                "nodefs.available": "1%",
                "imagefs.available": "1%",
            },
            "failSwapOn": False,
            "imageGCHighThresholdPercent": 100,
            "imageGCLowThresholdPercent": 99,
            "resolvConf": str(self.folder / "resolv.conf"),
            "syncFrequency": "10s",
            "tlsCertFile": str(self.pki / "kubelet.crt"),
            "tlsPrivateKeyFile": str(self.pki / "kubelet.key"),
        }

    def _proxy(self) -> Mapping[str, object]:
        """Every Service's packets go through the node: pods of one bridge would answer directly."""
        return {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": "iptables",
            "hostnameOverride": NODE,
            "clusterCIDR": PODS,
            "iptables": {"masqueradeAll": True},
            "conntrack": {"maxPerCore": 0},
            "clientConnection": {"kubeconfig": str(self.folder / "proxy.conf")},
        }

    def _network(self) -> Mapping[str, object]:
        addresses = {
            "type": "host-local",
            "ranges": [[{"subnet": PODS}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        }
        bridge = {
            "type": "bridge",
            "bridge": "pods",
            "isGateway": True,
            "ipMasq": True,
            "hairpinMode": True,
            "ipam": addresses,
        }
        ports = {"type": "portmap", "capabilities": {"portMappings": True}}
        return {"cniVersion": "0.4.0", "name": "pods", "plugins": [bridge, ports]}

    def _containerd(self) -> str:
        """Where a machine lets nobody lower the OOM score, no sandbox starts without the second."""
        return f"""version = 2
root = "{self.folder}/containerd/root"
state = "{self.folder}/containerd/state"
[grpc]
  address = "{self.containerd}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE}"
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{CNI_PLUGINS}"
    conf_dir = "{self.folder}/cni"
"""

    def _names(self) -> str:
        return f"""cluster.local:53 {{
  errors
  ready 127.0.0.1:8181
  kubernetes cluster.local {{
    kubeconfig {self.admin}
    ttl 1
  }}
}}
"""

    def _text(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)


def openssl(*words: str | Path) -> None:
    """Run it to its end; SpacesFailed with what it said where it fails."""
    run(str(needs.command("openssl", "openssl")), *map(str, words))
