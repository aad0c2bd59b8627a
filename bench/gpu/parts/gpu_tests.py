"""`tests/gpu` by pytest, a process a file: one row a test, as soon as the test has ended.

Files run one after the other, as several compare what the driver says of the whole GPU, and each
in a process of its own, as a fault of the GPU ends everything in the process that has it.
"""

import subprocess
import sys
import threading
from collections.abc import Iterator

from bench.gpu.gpu_bench import PartOptions, Say
from bench.gpu.part_process import ROW, marked
from bench.gpu.results_file import Row
from bench.measure.function_process import ROOT
from bench.measure.report import MeasurementFailed

# In order of worth: what others rest on comes first, what starts most processes last.
FILES = (
    "test_nvml",
    "test_worker_device",
    "test_lent_on_gpu",
    "test_streams_on_gpu",
    "test_green_contexts_on_gpu",
    "test_exec",
)
_TEST_S, _FILE_S, _LEAST_S = 80, 100.0, 8.0
_WORDS = 300


def measure(asked: PartOptions, say: Say) -> None:
    """Run them all; MeasurementFailed where one fails, or where all are skipped on a real GPU."""
    outcomes: list[str] = []
    wrong: list[str] = []
    for name in FILES:
        if asked.left_s() < _LEAST_S:
            wrong.append(f"{name} was not run")
            continue
        for row in _ran(name, asked, wrong):
            say(row)
            outcomes.append(row["outcome"])
    if wrong:
        raise MeasurementFailed("; ".join(wrong))
    if not asked.emulated and set(outcomes) <= {"skipped"}:
        raise MeasurementFailed("every test was skipped")


def _ran(name: str, asked: PartOptions, wrong: list[str]) -> Iterator[Row]:
    """The rows of one file; whatever failed is added to what is wrong."""
    # A machine's own plugins may be made for another pytest. Warnings of another torch than the
    # pinned one are no failures of ours.
    command = [sys.executable, "-m", "pytest", f"tests/gpu/{name}.py", "-v", "-W", "default"]
    command += ["-p", "no:cacheprovider", "-p", "pytest_asyncio.plugin", "-p", "pytest_timeout"]
    # A test may hang in the driver, where no signal reaches it.
    command += ["-p", "bench.gpu.pytest_rows", f"--timeout={_TEST_S}", "--timeout-method=thread"]
    environment = {**asked.environment, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    failed: list[str] = []
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        text=True,
        errors="replace",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    ) as running:
        assert running.stdout is not None
        stopping = threading.Timer(min(_FILE_S, asked.left_s()), running.kill)
        stopping.start()
        words = ""
        for line in running.stdout:
            said, row = marked(line.rstrip("\n"), ROW)
            if said:
                words = said
                print(said, flush=True)
            if isinstance(row, dict):
                failed += [row["test"]] if row["outcome"] == "failed" else []
                yield row
        stopping.cancel()
    if failed:
        wrong.append(f"failed: {', '.join(failed)}")
    if running.returncode not in {0, int(bool(failed))}:
        wrong.append(f"{name}: pytest ended with {running.returncode}: {words[-_WORDS:]}")
