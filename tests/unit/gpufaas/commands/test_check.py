"""`gpufaas check --static`: exit codes and what it prints."""

import json
from pathlib import Path

import pytest

from gpufaas.cli import EXIT_BAD_USE, main

Output = pytest.CaptureFixture[str]

GOOD = "import torch\nmodel.to('cuda')\ntorch.cuda.is_available()\n"


def script(folder: Path, source: str) -> str:
    path = folder / "app.py"
    path.write_text(source, encoding="utf-8")
    return str(path)


def test_check_passes_when_all_is_redirected_or_answered(capsys: Output, tmp_path: Path) -> None:
    assert main(["check", "--static", script(tmp_path, GOOD)]) == 0

    out = capsys.readouterr().out
    assert "redirected to the GPU: 1\n  app.py:2  model.to('cuda')" in out
    assert "answered in the function: 1" in out
    assert "    app.py:3  torch.cuda.is_available" in out
    assert out.endswith("nothing stands in the way\n")


@pytest.mark.parametrize("line", ["torch.cuda.CUDAGraph()", "torch.jit.script(model)"])
def test_check_fails_when_something_cannot_be_done_or_is_heavy(
    capsys: Output, tmp_path: Path, line: str
) -> None:
    assert main(["check", "--static", script(tmp_path, f"{GOOD}{line}\n")]) == 1

    out = capsys.readouterr().out
    assert "app.py:4" in out
    assert "to change: 1 " in out


def test_check_reports_the_modules_of_the_project(capsys: Output, tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "net.py").write_text("import cupy\n", encoding="utf-8")

    assert main(["check", "--static", "--json", script(tmp_path, "import parts.net\n")]) == 1

    answer = json.loads(capsys.readouterr().out)
    assert [Path(file).name for file in answer["files"]] == ["app.py", "net.py"]
    assert [(Path(f["file"]).name, f["line"]) for f in answer["findings"]] == [("net.py", 1)]
    assert answer["run"] is None


@pytest.mark.parametrize(
    ("options", "answer"),
    [
        (["missing.py"], "missing.py: No such file"),
        ([], "required: script\n"),
        (["--emulate-run", "soon", "app.py"], "no number of seconds"),
    ],
)
def test_check_refuses_bad_use_in_one_line(
    capsys: Output,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    answer: str,
) -> None:
    script(tmp_path, GOOD)
    monkeypatch.chdir(tmp_path)

    try:
        code = main(["check", *options])
    except SystemExit as left:
        code = int(left.code or 0)

    assert code == EXIT_BAD_USE
    error = capsys.readouterr().err
    assert answer in error
    assert error.count("\n") == 1
