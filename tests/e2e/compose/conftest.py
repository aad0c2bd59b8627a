"""The stack of docker-compose.yml on a Docker Engine, made once for all of these tests."""

from pathlib import Path

import pytest

from tests.e2e.compose.stack import FUNCTION_BASE, ComposeStack
from tests.kit import needs
from tests.kit.engines.docker_base_image import BASE
from tests.kit.engines.docker_engine import Engine
from tests.kit.engines.faas_cli import NoFaasCli, faas_cli
from tests.kit.engines.images.program_images import ETCD, NATS, PROMETHEUS, build, make_images
from tests.kit.engines.images.torch_image import TORCH, torch_image
from tests.kit.places import ROOT
from tests.kit.programs.own_names import IMPORTS, write_own_names
from tests.kit.stacks.handlers import GREETING, write

pytestmark = pytest.mark.group("compose", seconds=560)  # of all modules here

_IMAGES = {
    "BASE_IMAGE": BASE,
    "MANAGER_BASE_IMAGE": TORCH,
    "MANAGER_VENV_OPTIONS": "--system-site-packages",
    "ETCD_IMAGE": ETCD,
    "NATS_IMAGE": NATS,
    "PROMETHEUS_IMAGE": PROMETHEUS,
}


# One on a GPU, the example's, and a plain one.
_STACK = """
version: 1.0
provider: {name: openfaas}
functions:
  classify:
    lang: python3-torch-gpu
    handler: ./classify
    image: gpufaas-test/classify:1
  greets:
    lang: python3-torch-gpu
    handler: ./handlers/greets
    image: gpufaas-test/greets:1
    environment: {GREETING: good day}
    annotations: {com.gpufaas.enabled: "false"}
"""


@pytest.fixture(scope="session")
def stack(docker_engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> ComposeStack:
    """It is up."""
    needs.command("docker-compose", "docker-compose")
    needs.command("openssl", "openssl")
    make_images(docker_engine, tmp_path_factory.mktemp("images"))
    torch_image(docker_engine)
    found = ComposeStack(docker_engine, tmp_path_factory.mktemp("compose"), _IMAGES)
    found.up()
    return found


@pytest.fixture(scope="session")
def cli(stack: ComposeStack) -> Path:
    """faas-cli, logged in, with images of the examples built on our function base."""
    try:
        program = faas_cli()
    except NoFaasCli as error:
        needs.lacking(str(error))
    file = ROOT / "deploy/docker/function.Dockerfile"
    base = ("--build-arg", f"BASE_IMAGE={TORCH}")
    build(stack.engine, "--tag", FUNCTION_BASE, *base, "--file", file, ROOT)
    (stack.folder / "template").symlink_to(ROOT / "template")
    (stack.folder / "classify").symlink_to(ROOT / "functions" / "classify")
    write(stack.folder, "greets", IMPORTS + GREETING)
    write_own_names(stack.folder / "handlers" / "greets")
    (stack.folder / "stack.yml").write_text(_STACK)
    stack.faas(program, "login", "--password-stdin", "--gateway", stack.url, stdin=stack.password)
    on_ours = ("--build-arg", f"BASE_IMAGE={FUNCTION_BASE}")
    stack.faas(program, "build", "-f", "stack.yml", "--parallel", "2", *on_ours)
    return program
