"""`tests/gpu` by pytest: one row a test."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from bench.gpu.gpu_bench import PartOptions, Say
from bench.gpu.results_file import Row
from bench.measure.function_process import ROOT
from bench.measure.report import MeasurementFailed

_TEST_S = 60
_WORDS = 400


def measure(asked: PartOptions, say: Say) -> None:
    """Run them all; MeasurementFailed where one fails, or where all are skipped on a real GPU."""
    with tempfile.TemporaryDirectory(prefix="gpu-tests") as folder:
        report = Path(folder) / "report.xml"
        # Warnings of another torch than the pinned one are no failures of ours.
        command = [sys.executable, "-m", "pytest", "tests/gpu", "-v", "-p", "no:cacheprovider"]
        command += ["-p", "no:xdist", "-W", "default", f"--timeout={_TEST_S}"]
        command += [f"--junitxml={report}"]
        code = subprocess.run(command, cwd=ROOT, env=asked.environment, check=False).returncode
        if not report.is_file():
            raise MeasurementFailed(f"pytest ended with {code} and no report")
        rows = list(_rows(report))
    for row in rows:
        say(row)
    failed = [row["test"] for row in rows if row["outcome"] == "failed"]
    if failed:
        raise MeasurementFailed(f"failed: {', '.join(failed)}")
    if not asked.emulated and all(row["outcome"] == "skipped" for row in rows):
        raise MeasurementFailed("every test was skipped")


def _rows(report: Path) -> Iterator[Row]:
    for case in ElementTree.parse(report).iter("testcase"):
        found = {child.tag: child for child in case}
        outcome, words = "passed", ""
        for tag, name in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
            if tag in found:
                outcome, words = name, (found[tag].get("message") or "")[:_WORDS]
        name = f"{case.get('classname', '').removeprefix('tests.gpu.')}::{case.get('name')}"
        took_s = float(case.get("time", 0))
        yield {"test": name, "outcome": outcome, "took_s": took_s, "words": words}
