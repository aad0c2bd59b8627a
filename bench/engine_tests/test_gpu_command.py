"""`make gpu`: parts under limits, and results that outlast them."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from bench.gpu.__main__ import PARTS, WITHIN_S, main
from bench.gpu.part_log import PartLog
from bench.gpu.part_process import PartProcess
from bench.gpu.results_file import ResultsFile, Row, State

ROOT = Path(__file__).parents[2]


# -- one part -------------------------------------------------------------------------------------


class Heard:
    """A process of parts that is this program, what it gave, and what it said beside that."""

    def __init__(self, program: str) -> None:
        environment = dict(os.environ)  # noqa: TID251 - for a child
        command = [sys.executable, "-u", "-c", program]
        self.process = PartProcess(command, environment, lambda: self.now_s)
        self.now_s = 0.0
        self.rows: list[Row] = []
        self.words: list[str] = []

    def run(self, name: str = "cold", limit_s: float = 30.0) -> str:
        return self.process.run(name, limit_s, self.rows.append, self._hear)

    def _hear(self, words: str) -> None:
        self.words.append(words)
        if words == HANGS:  # as long as it may
            self.now_s += 60.0


HANGS = "at it"
# What every program begins with: how a part gives a row, and says that it has ended.
GIVES = (
    "import subprocess, sys, time\n"
    "from bench.gpu.part_process import say, say_ended\n"
    "say({'a': 1})\n"
)


def test_part_gives_its_rows_and_no_words_when_it_ends_well() -> None:
    part = Heard(GIVES + "print('words'); say({'a': 2}); say_ended('')")
    assert part.run() == ""
    assert (part.rows, part.words) == ([{"a": 1}, {"a": 2}], ["words"])
    part.process.close()


def test_lines_of_libraries_are_words_whatever_they_look_like() -> None:
    part = Heard(
        GIVES + "print('row 5 of the table'); print('ended with 1 by the driver')\n"
        "print('\\x02row 5'); print('\\x02ended {'); print('half a line', end='')\n"
        "say({'a': 2}); print('and', end=''); say_ended('no time')"
    )
    assert part.run() == "no time"
    assert part.rows == [{"a": 1}, {"a": 2}]
    assert [words.lstrip("\x02") for words in part.words] == [
        "row 5 of the table",
        "ended with 1 by the driver",
        "ended {",
        "half a line",
        "and",
    ]
    part.process.close()


def test_process_runs_parts_one_after_the_other_until_it_is_closed() -> None:
    part = Heard(
        GIVES + "for line in sys.stdin:\n"
        "    name, within_s = line.split()\n"
        "    say({'part': name, 'within_s': float(within_s)})\n"
        "    say_ended('no time was left' if name == 'cold' else '')\n"
    )
    assert part.run("memory", limit_s=30.0) == ""
    assert part.run("cold", limit_s=40.0) == "no time was left"
    assert part.run("warm", limit_s=5.0) == ""
    ended_before = part.process.ended
    part.process.close()
    assert (ended_before, part.process.ended) == (False, True)
    assert part.rows[1:] == [
        {"part": "memory", "within_s": 20.0},
        {"part": "cold", "within_s": 30.0},
        {"part": "warm", "within_s": 1.0},
    ]


def test_part_says_what_failed_and_keeps_the_rows_before() -> None:
    part = Heard(GIVES + "raise SystemExit('no driver here')")
    assert part.run() == "ended with 1: no driver here"
    assert part.rows == [{"a": 1}]
    assert part.process.ended
    assert part.run() == "ended with 1: "  # a second one finds nobody


@pytest.mark.parametrize("deaf", [False, True])
def test_part_is_stopped_at_its_limit_with_all_that_it_started(
    tmp_path: Path, *, deaf: bool
) -> None:
    mark = tmp_path / "pid"
    ignore = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" if deaf else ""
    part = Heard(
        f"{GIVES}{ignore}"
        "one = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'])\n"
        f"open({str(mark)!r}, 'w').write(str(one.pid))\n"
        f"print({HANGS!r}); time.sleep(300)"
    )
    assert part.run(limit_s=50.0) == f"stopped after 50 s; its last lines: {HANGS}"
    assert part.rows == [{"a": 1}]
    assert part.process.ended
    assert _ended(int(mark.read_text()))


def test_part_is_over_when_a_process_that_left_it_holds_its_output(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    part = Heard(
        f"{GIVES}one = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        f"open({str(mark)!r}, 'w').write(str(one.pid))\n"
    )
    assert part.run() == "ended with 0: "
    os.kill(int(mark.read_text()), signal.SIGKILL)  # there is one still


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
    """Stands in for the processes of parts: which ran, in which process, and what each comes to."""

    def __init__(self, failing: Mapping[str, str] | None = None, dying: Sequence[str] = ()) -> None:
        self.names: list[str] = []
        self.commands: list[Sequence[str]] = []
        self.processes: list[list[str]] = []
        self._failing = failing or {}
        self._dying = dying

    def __call__(self, command: Sequence[str], environment: Mapping[str, str]) -> "RanProcess":
        del environment
        self.commands.append(command)
        self.processes.append([])
        return RanProcess(self)

    def run(self, name: str) -> tuple[str, bool]:
        self.names.append(name)
        self.processes[-1].append(name)
        return self._failing.get(name, ""), name in self._dying


class RanProcess:
    """One of them."""

    def __init__(self, ran: Ran) -> None:
        self._ran = ran
        self.ended = False

    def kill(self) -> None:
        self.ended = True

    def run(
        self, name: str, limit_s: float, add: Callable[[Row], None], log: Callable[[str], None]
    ) -> str:
        assert not self.ended
        log(f"words of {name}")
        add({"part": name, "limit_s": limit_s})
        failed, self.ended = self._ran.run(name)
        return failed

    def close(self) -> None:
        self.ended = True


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
    assert kept(tmp_path)["cold"]["rows"] == [{"part": "cold", "limit_s": 170.0}]
    assert "out of patience" in (tmp_path / "gpu-emulated.md").read_text()
    log = (tmp_path / "gpu-emulated.log").read_text().splitlines()
    assert [line for line in log if "==" not in line] == [
        f"words of {name}" for name in first.names
    ]

    second = Ran()
    assert emulated(tmp_path, second) == 0
    assert second.names == ["smoke", "warm"]
    third = Ran()
    assert emulated(tmp_path, third, "--again", "--only", "cold", "facts") == 0
    assert third.names == ["facts", "cold"]
    assert {part["state"] for part in kept(tmp_path).values()} == {"done"}


def test_part_begins_only_when_it_is_worth_it_in_the_time_that_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = Ran()
    assert emulated(tmp_path, ran, "--within", "32") == 1
    assert ran.names == ["facts", "smoke", "tests", "copies", "memory", "suspend"]
    said = capsys.readouterr().out
    assert "programs: NOT RUN, too little time is left; run this again" in said
    assert set(kept(tmp_path)) == set(ran.names)
    (row,) = kept(tmp_path)["memory"]["rows"]
    assert 0 < row["limit_s"] < 32


def test_parts_that_use_a_node_share_a_process_and_no_others_do(tmp_path: Path) -> None:
    ran = Ran(failing={"cold": "no time was left"})
    assert emulated(tmp_path, ran) == 1
    shared = [names for names in ran.processes if len(names) > 1]
    assert shared == [["memory", "cold", "warm"]]
    assert [name for names in ran.processes for name in names] == [each.name for each in PARTS]

    lost = Ran(failing={"cold": "ended with -11: "}, dying=["cold"])
    assert emulated(tmp_path, lost, "--again", "--only", "memory", "cold", "warm") == 1
    assert lost.processes == [["memory", "cold"], ["warm"]]


def test_parts_that_need_calls_are_not_begun_after_a_smoke_test_that_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = Ran(failing={"smoke": "workers see no torch"})
    assert emulated(tmp_path, ran) == 1
    assert ran.names == ["facts", "smoke", "tests", "copies", "suspend"]
    said = capsys.readouterr().out
    assert "smoke: FAILED: workers see no torch" in said
    assert "cold: NOT RUN, smoke has failed" in said


def test_smoke_test_is_made_again_when_it_is_asked_for(tmp_path: Path) -> None:
    assert emulated(tmp_path, Ran(), "--only", "smoke", "copies") == 0
    again = Ran()
    assert emulated(tmp_path, again, "--only", "smoke", "copies") == 0
    assert again.names == ["smoke"]


def test_profile_goes_on_from_the_rows_that_it_has(tmp_path: Path) -> None:
    results = ResultsFile(tmp_path, "emulated")
    results.begin("profile")
    results.add("profile", {"model": "alexnet"})
    results.end("profile", 1.0, "no time was left")
    assert emulated(tmp_path, Ran(), "--only", "profile") == 0
    assert len(kept(tmp_path)["profile"]["rows"]) == 2
    assert emulated(tmp_path, Ran(), "--only", "profile", "--again") == 0
    assert len(kept(tmp_path)["profile"]["rows"]) == 1


def test_log_keeps_the_first_and_the_last_of_what_a_part_says(tmp_path: Path) -> None:
    path = tmp_path / "gpu.log"
    with closing(PartLog(path, "cold")) as log:
        for number in range(40_000):
            log.add(f"{number:05} {'x' * 60}")
    lines = path.read_text().splitlines()
    assert lines[0] == "== cold"
    assert lines[1].startswith("00000 ")
    assert lines[-1].startswith("39999 ")
    assert any(line.startswith("-- ") and line.endswith(" are left out") for line in lines)
    assert path.stat().st_size < 2 << 20


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
