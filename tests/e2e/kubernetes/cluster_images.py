"""The images that the chart and the examples name, in an archive: built as people build them."""

import os
import subprocess
from pathlib import Path

from tests.kit.engines.docker_base_image import BASE, base_image
from tests.kit.engines.docker_engine import Engine, EngineFailed
from tests.kit.engines.images.program_images import ETCD, build, etcd_image
from tests.kit.engines.images.torch_image import TORCH, torch_image
from tests.kit.places import ROOT
from tests.kit.stacks.handlers import GREETING, write

# As docs/kubernetes.md names them.
CONTROL = "registry.example/gpufaas/control:0.1.0"
MANAGER = "registry.example/gpufaas/manager:0.1.0"
CHARTS_ETCD = "registry.example/gpufaas/etcd:3.5.28"
FUNCTIONS = ("classify:latest", "greets:1")

_FUNCTION_BASE = "gpufaas-test/function:latest"
_BUILD_S = 900.0
_STACK = """
version: 1.0
provider: {name: openfaas}
functions:
  classify:
    lang: python3-torch-gpu
    handler: ./classify
    image: classify:latest
  greets:
    lang: python3-torch-gpu
    handler: ./handlers/greets
    image: greets:1
    environment: {GREETING: good day}
    annotations: {com.gpufaas.enabled: "false"}
"""


def image_archive(engine: Engine, faas_cli: Path, folder: Path) -> Path:
    """All of them; torch's files are missing in it, as they are in the Engine's image of torch."""
    base_image(engine)
    torch_image(engine)
    etcd_image(engine, folder)
    engine.docker("tag", ETCD, CHARTS_ETCD)
    # As the compose file builds them, so that the Engine does it once for both.
    _ours(engine, CONTROL, "control", f"BASE_IMAGE={BASE}", "COMMIT=")
    chosen = ("VENV_OPTIONS=--system-site-packages", "TORCH=", "TORCH_INDEX=", "COMMIT=")
    _ours(engine, MANAGER, "manager", f"BASE_IMAGE={TORCH}", *chosen)
    _ours(engine, _FUNCTION_BASE, "function", f"BASE_IMAGE={TORCH}")
    _functions(engine, faas_cli, folder)
    archive = folder / "images.tar"
    engine.docker("save", "--output", archive, CONTROL, MANAGER, CHARTS_ETCD, *FUNCTIONS)
    return archive


def _ours(engine: Engine, name: str, file: str, *arguments: str) -> None:
    chosen = [word for one in arguments for word in ("--build-arg", one)]
    dockerfile = ROOT / f"deploy/docker/{file}.Dockerfile"
    build(engine, "--tag", name, *chosen, "--file", dockerfile, ROOT)


def _functions(engine: Engine, faas_cli: Path, folder: Path) -> None:
    (folder / "template").symlink_to(ROOT / "template")
    (folder / "classify").symlink_to(ROOT / "functions" / "classify")
    write(folder, "greets", GREETING)
    (folder / "stack.yml").write_text(_STACK)
    words = ["build", "-f", "stack.yml", "--build-arg", f"BASE_IMAGE={_FUNCTION_BASE}"]
    done = subprocess.run(
        [faas_cli, *words],
        cwd=folder,
        env={
            "PATH": f"{os.defpath}:/usr/sbin:/sbin",
            "HOME": str(folder),
            "DOCKER_BUILDKIT": "1",
            **engine.environment,
        },
        capture_output=True,
        text=True,
        timeout=_BUILD_S,
        check=False,
    )
    if done.returncode:
        raise EngineFailed(f"faas-cli build: {done.stdout[-4000:]}{done.stderr[-2000:]}")
