"""`python -m bench.idle`: what `gpufaas up` costs while nobody calls a function."""

import argparse
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from bench.measure.process_usage import PartUsage, process_tree, usage_by_part
from bench.measure.report import BenchReport, load_average
from bench.measure.whole_stack import whole_stack

_DEVICES = "cpu:2"
_SETTLE_S = 20.0
_MOST_BYTES, _MOST_CORE = 300e6, 0.03


def main() -> None:
    """Measure, and keep the figures when asked to."""
    parser = argparse.ArgumentParser(prog="bench.idle", description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0, help="to measure for (30)")
    parser.add_argument("--keep", action="store_true", help="write to bench/results/ too")
    options = parser.parse_args()
    report = BenchReport("The idle stack", f"python -m bench.idle --seconds {options.seconds:g}")
    measure(report, options.seconds)
    if options.keep:
        print(report.keep("idle"))


def measure(report: BenchReport, seconds: float) -> None:
    """Memory and processor time of all processes of a stack without functions."""
    with tempfile.TemporaryDirectory(prefix="idle") as name:
        root = Path(name)
        root.chmod(0o755)
        with whole_stack(root, ["--devices", _DEVICES]) as stack:
            time.sleep(_SETTLE_S)
            before, began_s = process_tree(stack.pid), time.monotonic()
            time.sleep(seconds)
            after, took_s = process_tree(stack.pid), time.monotonic() - began_s
    _show(report, before, after, took_s)


def _show(
    report: BenchReport,
    before: Mapping[int, PartUsage],
    after: Mapping[int, PartUsage],
    took_s: float,
) -> None:
    report.add("\n## The idle stack\n")
    report.add(
        f"`gpufaas up --devices {_DEVICES}` without functions; {len(after)} processes, after "
        f"{_SETTLE_S:g} s of rest; processor time over {took_s:.0f} s. PSS: shared pages are "
        f"divided among the processes that share them. Load average: {load_average()}.\n"
    )
    report.add(
        "| part | PSS MB | of processes with torch | % of a core |\n| --- | ---: | ---: | ---: |"
    )
    earlier, later = usage_by_part(before), usage_by_part(after)
    all_bytes = sum(part.pss_bytes for part in later.values())
    torch_bytes = sum(part.torch_bytes for part in later.values())
    all_core = 0.0
    for name, now in sorted(later.items()):
        old_s = earlier[name].processor_s if name in earlier else 0.0
        core = (now.processor_s - old_s) / took_s
        all_core += core
        report.add(f"| {name} | {_megabytes(now.pss_bytes, now.torch_bytes)} | {100 * core:.2f} |")
    report.add(f"| all | {_megabytes(all_bytes, torch_bytes)} | {100 * all_core:.2f} |")
    report.facts["idle"] = {
        "pss_bytes": all_bytes,
        "torch_bytes": torch_bytes,
        "core": all_core,
        "parts_pss_bytes": {name: part.pss_bytes for name, part in sorted(later.items())},
    }
    reached = all_bytes <= _MOST_BYTES and all_core <= _MOST_CORE
    report.add(
        f"\nTarget: at most {_MOST_BYTES / 1e6:.0f} MB and {100 * _MOST_CORE:g} % of a core: "
        f"{'reached' if reached else 'NOT reached'}."
    )


def _megabytes(pss_bytes: int, torch_bytes: int) -> str:
    return f"{pss_bytes / 1e6:.0f} | {torch_bytes / 1e6:.0f}"


if __name__ == "__main__":
    main()
