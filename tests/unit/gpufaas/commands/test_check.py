"""`gpufaas check` refuses bad use before it runs anything."""

from pathlib import Path

import pytest

from gpufaas.cli import EXIT_BAD_USE, main

Output = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("options", "answer"),
    [
        (["missing.py"], "missing.py: no such file"),
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
    (tmp_path / "app.py").write_text("import torch\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)

    try:
        code = main(["check", *options])
    except SystemExit as left:
        code = int(left.code or 0)

    assert code == EXIT_BAD_USE
    error = capsys.readouterr().err
    assert answer in error
    assert error.count("\n") == 1
