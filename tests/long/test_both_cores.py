"""The core compiled and the core as Python: the same actions, tracebacks to read.

Other tests run on the one that `gpufaas doctor` names: as Python, unless `make compiled` was run.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from common.compiled_modules import SWITCH
from deploy.compiled.chosen_sources import sources
from deploy.compiled.compilation import MissingCompiler, made
from tests.kit import needs
from tests.kit.cache import cache_folder
from tests.kit.places import ROOT

pytestmark = pytest.mark.group("both_cores", seconds=20)

# A policy that gives one request two leases: the placer's assertion fails.
FAILS_INSIDE = """
from cache_manager.eviction.lru import Rule
from scheduler.composition import compose
from scheduler.core.core import Core
from scheduler.model.events import GpuJoined, RequestArrived
from scheduler.policies.placement_policy import Place
from tests.kit.cores.builders import gpu, request

class Twice:
    def decide(self, view):
        slot, head = next(view.idle_slots()), view.first()
        yield Place((head,), slot, "once")
        yield Place((head,), slot, "twice")

core = compose(Twice(), Rule())
core.handle(GpuJoined(gpu("g0")), 0.0)
core.handle(RequestArrived(request("r0")), 0.0)
"""
ASKS_DOCTOR = """
from gpufaas.commands import doctor
print(next(each.found for each in doctor.examine() if each.name == "core"))
"""


@pytest.fixture(scope="module")
def build() -> Path:
    """The compiled core of these sources."""
    try:
        return made(cache_folder() / "compiled")
    except MissingCompiler as error:
        needs.lacking(f"needs a C compiler and Python's headers: {error}")


def python(*arguments: str, core: str) -> subprocess.CompletedProcess[str]:
    """A process with that core."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={SWITCH: core},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


def test_build_is_of_every_chosen_source_and_is_what_runs(build: Path) -> None:
    program = "import scheduler.core.core as it; print(it.__file__, it.Core.__module__)"

    found = python("-c", program, core=str(build))
    file, module = found.stdout.split()
    assert (Path(file).parent, module) == (build.resolve(), "scheduler.core.core")
    assert len(list(build.glob("*.so"))) == len(sources()) + 1  # and what they share
    assert python("-c", program, core="off").stdout.split()[0].endswith("core.py")


def test_doctor_says_which_core_runs_and_why(build: Path) -> None:
    answers = [python("-c", ASKS_DOCTOR, core=core).stdout for core in ("off", str(build))]

    assert answers == ["as Python: GPUFAAS_COMPILED=off\n", "compiled\n"]


def test_both_cores_take_the_same_actions_in_random_lives_under_every_policy(build: Path) -> None:
    runs = [
        python("-m", "tests.kit.cores.action_digest", core=core) for core in ("off", str(build))
    ]

    as_python, compiled = [run.stdout for run in runs]
    assert len(as_python) == 64, runs[0].stderr
    assert compiled == as_python, runs[1].stderr


def test_traceback_names_file_line_and_function_when_compiled_code_fails(build: Path) -> None:
    shown = {
        core: [
            line.strip().replace(f"{ROOT}/", "")
            for line in python("-c", FAILS_INSIDE, core=core).stderr.splitlines()
            if "scheduler/core/" in line
        ]
        for core in ("off", str(build))
    }

    as_python, compiled = shown.values()
    assert compiled == as_python
    functions = [line.rpartition(" in ")[2] for line in compiled]
    assert functions == ["handle", "_decide", "decide", "_place"]
