"""`python -m bench`: measure the core, print it, and with --full keep it in bench/results/."""

import argparse
import platform
import sys
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path

from bench import measure
from bench.measure import NAIVE_SIZES, SIZES, Cost
from bench.steady import Size
from scheduler import policies

RESULTS = Path(__file__).parent / "results"
PICTURE = Path("docs/pictures/placement-cost.png")
THESIS = ("rr", "lb", "rro3", "lalb", "lalbo3")


def main() -> int:
    """Everything with --full (some minutes); without it, the smaller sizes alone."""
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument("--full", action="store_true", help="up to a million waiting; keep it")
    full = parser.parse_args().full
    names = THESIS + tuple(name for name in policies.available() if name not in THESIS)
    today = datetime.now(tz=UTC).date().isoformat()
    lines = [f"# The core, measured on {today}", "", *_machine(), ""]
    costs = _say(lines, _costs(names, SIZES if full else SIZES[:3], naive=False))
    naive = _say(lines, _costs(THESIS, NAIVE_SIZES if full else NAIVE_SIZES[:2], naive=True))
    _say(lines, _memory(1_000_000 if full else 100_000))
    _say(lines, _speed(names))
    if full:
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"{today}-core.md"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        import_module("bench.picture").draw(costs, naive, PICTURE)
        print(f"\n{path}\n{PICTURE}")
    return 0


def _machine() -> list[str]:
    model = "unknown processor"
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return [
        "Command: `make bench-full`.",
        f"Machine: {model}, shared; Python {platform.python_version()}.",
        f"Each figure is the median of {measure.REPEATS} runs.",
    ]


def _say(lines: list[str], part: tuple[list[str], list[Cost]]) -> list[Cost]:
    lines += [*part[0], ""]
    return part[1]


def _costs(
    names: tuple[str, ...], sizes: tuple[Size, ...], *, naive: bool
) -> tuple[list[str], list[Cost]]:
    title = "The naive version of the tests" if naive else "Cost of one placement"
    lines = _title(title)
    _emit(lines, "| policy | size | median µs | 99th percentile µs | median, of the smallest |")
    _emit(lines, "| --- | --- | ---: | ---: | ---: |")
    costs: list[Cost] = []
    smallest: dict[str, float] = {}
    measured = measure.naive_costs if naive else measure.placement_costs
    for cost in measured(names, sizes):
        costs.append(cost)
        ratio = cost.median_us / smallest.setdefault(cost.policy, cost.median_us)
        _emit(
            lines,
            f"| {cost.policy} | {cost.size} | {cost.median_us:.1f} | {cost.p99_us:.1f} "
            f"| {ratio:.2f} |",
        )
    return lines, costs


def _memory(waiting: int) -> tuple[list[str], list[Cost]]:
    lines = _title(f"Memory of a waiting request ({waiting:,} of them)")
    _emit(lines, "| policy | bytes |")
    _emit(lines, "| --- | ---: |")
    for name in ("rr", "lalbo3"):
        _emit(lines, f"| {name} | {measure.bytes_a_waiting_request(name, waiting):.0f} |")
    return lines, []


def _speed(names: tuple[str, ...]) -> tuple[list[str], list[Cost]]:
    lines = _title("The simulator at 12 GPUs")
    _emit(lines, "| policy | requests a second of wall time |")
    _emit(lines, "| --- | ---: |")
    for name in names:
        _emit(lines, f"| {name} | {measure.simulated_requests_a_second(name):,.0f} |")
    return lines, []


def _title(title: str) -> list[str]:
    lines: list[str] = []
    _emit(lines, f"\n## {title}\n" if sys.stdout.isatty() else f"## {title}\n")
    return lines


def _emit(lines: list[str], line: str) -> None:
    lines.append(line)
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
