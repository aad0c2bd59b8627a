"""Every allowed operator with arguments that no model has; the fuzz itself with faulty ones."""

import subprocess
import sys

from hunt.fuzz.planted import FAULTY, SOUND
from tests.kit import needs
from tests.kit.places import ROOT


def _fuzz(*words: str) -> tuple[int, str]:
    needs.command("cc", "gcc")
    found = subprocess.run(
        [sys.executable, "-m", "hunt.fuzz", *words],
        cwd=ROOT,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return found.returncode, found.stdout


def test_no_operator_leaves_its_memory_when_its_arguments_are_absurd() -> None:
    status, output = _fuzz("--cases", "2", "--first", "3", "--limit", "20")
    assert status == 0, output
    assert "0 findings" in output
    called = int(output.split(" operators, ")[0].split()[-1])
    assert called > 2500


def test_fuzz_finds_every_fault_that_was_planted() -> None:
    status, output = _fuzz("--planted", "--cases", "2")
    assert status == 1, output
    lines = [line for line in output.splitlines() if line.startswith("t:planted")]
    found = {line.split()[0]: line for line in lines}
    assert set(found) == set(FAULTY), output
    assert SOUND not in found
    for name, what in FAULTY.items():
        assert what in found[name]


def test_merged_calls_give_what_single_calls_give_when_programs_are_absurd() -> None:
    status, output = _fuzz("--merged", "--cases", "2", "--limit", "20", "--only", "mm")
    assert status == 0, output
    assert "0 findings" in output
    merged = int(output.split(" operators gave a result")[0].split()[-1])
    assert merged > 10
