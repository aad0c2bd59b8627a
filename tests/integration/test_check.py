"""`gpufaas check` runs a program for real: what ran where, by its lines."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.group("check", seconds=50)

CHECK = [sys.executable, "-P", "-m", "gpufaas", "check", "--devices", "cpu:1", "--json"]

GOOD = """\
import torch
device = "cuda" if torch.cuda.is_available() else "cpu"
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
model = model.to(device).eval()
with torch.no_grad():
    print(model(torch.ones(3, 8).to(device)).shape)
"""

HEAVY = """\
import sys
import torch
from torch import nn

class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        y = self.layer(x)
        if y.sum() > 0:
            y = y * 2
        return y + 1

model = Branching().cuda().requires_grad_(False)
model(torch.ones(2, 4).cuda())
wide = torch.ones(1500, 1500).cuda()
wide @ wide
try:
    torch.cuda.graph(None)
except RuntimeError:
    print("caught", file=sys.stderr)
getattr(torch.cuda, "power_draw")()
"""


def check(path: Path, code: int) -> tuple[dict[str, Any], str]:
    """What it says of a program, and what the program wrote to its standard error."""
    done = subprocess.run(
        [*CHECK, path.name],
        cwd=path.parent,
        capture_output=True,
        text=True,
        timeout=270.0,
        check=False,
    )
    assert done.returncode == code, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    return said, done.stderr


def lines(said: dict[str, Any], **wanted: object) -> list[int]:
    """The lines of the findings with these facts."""
    found = said["findings"]
    return [f["line"] for f in found if all(f[name] == value for name, value in wanted.items())]


def test_check_passes_when_the_whole_model_runs_in_graphs(tmp_path: Path) -> None:
    path = tmp_path / "app.py"
    path.write_text(GOOD, encoding="utf-8")

    said, errors = check(path, 0)

    assert "torch.Size([3, 2])" in errors
    assert (said["run"]["exit_code"], said["run"]["share_in_graphs"]) == (0, 1.0)
    assert said["findings"] == []


def test_check_shows_lines_of_what_stays_local_breaks_or_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "app.py"
    path.write_text(HEAVY, encoding="utf-8")

    said, errors = check(path, 1)

    assert "caught" in errors
    assert said["run"]["exit_code"] == 1
    assert lines(said, seen="break", why="a branch depends on a tensor's value") == [12]
    assert lines(said, heavy=True) == [19]
    assert lines(said, outcome="cannot") == [21, 24]
    assert lines(said, outcome="cannot", remedy="ask the node") == [24]
    assert {finding["file"] for finding in said["findings"]} == {str(path.resolve())}


HANDLER = """\
import json
import torch
from common import WIDTH
device = "cuda" if torch.cuda.is_available() else "cpu"
model = torch.nn.Linear(WIDTH, 2).eval().to(device)

def handle(event, context):
    ones = torch.ones(json.loads(event.body)["rows"], WIDTH, device=device)
    with torch.no_grad():
        return {"scores": model(ones).tolist()}
"""


def test_check_calls_a_handler_with_its_example_beside_packages_named_as_ours(
    tmp_path: Path,
) -> None:
    for name in ("common", "scheduler", "tests", "bench"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("WIDTH = 4\n", encoding="utf-8")
    (tmp_path / "handler.py").write_text(HANDLER, encoding="utf-8")

    said, errors = check(tmp_path / "handler.py", 1)
    assert "there is no example.json: an empty call is made" in errors
    assert 'File "handler.py", line 8, in handle' in errors

    (tmp_path / "example.json").write_text('{"body": {"rows": 3}}', encoding="utf-8")
    said, errors = check(tmp_path / "handler.py", 0)
    assert (said["run"]["exit_code"], said["run"]["share_in_graphs"]) == (0, 1.0)


def test_check_names_lines_of_the_program_alone_when_it_computes_without_a_module(
    tmp_path: Path,
) -> None:
    lines = ("x = torch.ones(40, 40, device='cuda')", "for _ in range(30): x = torch.tanh(x @ x)")
    sparse = ("y = x.to_sparse()", "print((y @ x).shape)")
    (tmp_path / "app.py").write_text("\n".join(["import torch", *lines, *sparse]))
    said, told = check(tmp_path / "app.py", 0)
    assert "app.py:3: the program runs on the function's own processor" in told
    assert "notes.py" not in told
    remedies = {
        finding["what"].partition(":")[0]: finding["remedy"] for finding in said["findings"]
    }
    assert remedies["matmul"]
    assert remedies["sparse matmul"] == ""


def test_check_says_so_when_there_is_no_such_python(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(GOOD, encoding="utf-8")
    command = [*CHECK, "--python", "/no/python", "app.py"]

    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=270.0, check=False
    )

    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr
        == "gpufaas exec: /no/python: not found\ngpufaas check: the program did not run\n"
    )
