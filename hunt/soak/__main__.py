"""`python -m hunt.soak`: the examples for a while, with all that can happen to them at random.

Every few seconds each part's descriptors, memory, threads and tables are sampled. In the end the
second half of each series is judged, and each part is said to be flat, or to grow by so much.
`--watch gateway` has the gateway itself say what its memory consists of.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from bench.measure.drawn_pictures import draw_picture
from bench.measure.report import BenchReport, load_average
from gpufaas.output.optional_pictures import make_folder
from hunt.soak.attribution.watched_parts import DETAILS, PARTS, WatchPlan
from hunt.soak.mixed_load import rows_of
from hunt.soak.part_verdicts import HEAD, overloaded, verdicts_of, with_interval
from hunt.soak.soak_growth import SeriesGrowth, growth_of
from hunt.soak.soak_run import SoakOutcome, SoakPlan, soak
from hunt.soak.soak_sampler import Series, SeriesName

_PICTURE = "hunt.soak.growth_picture"
_SERIES_HEAD = (
    "| part | what | level | growth an hour (interval) | allowed | |\n"
    "| --- | --- | ---: | ---: | ---: | --- |"
)


def main() -> int:
    """Run it, print what was found; 1 if anything grows, is left, or was answered wrongly."""
    parser = argparse.ArgumentParser(prog="hunt.soak", description=__doc__)
    add = parser.add_argument
    add("--seconds", type=float, default=60.0, help="how long (60)")
    add("--rate", type=float, default=6.0, help="calls a second (6)")
    add("--seed", type=int, default=1, help="of calls and changes (1)")
    add("--every", type=float, default=5.0, help="seconds between two samples (5)")
    add("--out", default="out", help="the folder of the samples and the picture (out)")
    add("--keep", action="store_true", help="keep the table in bench/results/")
    add(
        "--watch", action="append", default=[], choices=PARTS, help="have this part say what it has"
    )
    add("--watch-every", type=float, default=20.0, help="seconds between two of its samples (20)")
    add("--remember", type=int, help="calls that gateway and scheduler remember (2,000 of a kind)")
    add("--detail", choices=DETAILS, default="", help="by what allocated it, or what holds it")
    options = parser.parse_args()
    watch = WatchPlan(options.watch, options.watch_every, options.detail)
    times = options.seconds, options.rate, options.seed, options.every
    plan = SoakPlan(*times, watch, options.remember)
    report = BenchReport("Soak", f"python -m hunt.soak {' '.join(sys.argv[1:])}".strip())
    report.add(
        f"The examples at {plan.rate:g} calls a second for {plan.seconds:g} s, seed {plan.seed}, "
        f"a sample every {plan.every_s:g} s. Load average before: {load_average()}."
    )
    outcome = soak(plan)
    growths = {name: growth_of(points, name.resolution) for name, points in outcome.series.items()}
    good = _conclude(report, outcome, growths)
    report.add(f"\nLoad average after: {load_average()}.")
    folder = make_folder(options.out)
    _write(outcome.series, folder / "soak.json")
    draw_picture(_PICTURE, str(folder / "soak.svg"), outcome.series)
    if options.keep:
        print(f"\n{report.keep('soak')}")
    return 0 if good else 1


def _conclude(
    report: BenchReport, outcome: SoakOutcome, growths: Mapping[SeriesName, SeriesGrowth | None]
) -> bool:
    """Add everything to the report; whether all is as it should be."""
    report.add("\n| calls | answers |\n| --- | --- |\n" + "\n".join(rows_of(outcome.statuses)))
    for title, counts in (("made", outcome.changes.made), ("declined", outcome.changes.declined)):
        shown = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
        report.add(f"\nChanges {title}: {shown or 'none'}.")
    judged = {name: growth for name, growth in growths.items() if growth is not None}
    verdicts = verdicts_of(growths)
    report.add(f"\n## The parts\n\n{HEAD}\n" + "\n".join(each.row for each in verdicts))
    wrong = {
        "What grows": [
            f"{name.part}: {name.what}, {with_interval(name, found)} an hour "
            f"on {name.shown(found.level)}"
            for verdict in verdicts
            for name, found in verdict.grown_in_order
        ],
        "What is left": outcome.left,
        "Answers that should not be": [f"{text}: {n}" for text, n in outcome.unexpected.items()],
        "Changes that failed": outcome.changes.failures,
    }
    for title, lines in wrong.items():
        report.add(f"\n## {title}\n\n" + ("\n".join(f"- {line}" for line in lines) or "Nothing."))
    for line in overloaded(growths):
        report.add(f"\nThe load was more than was answered: {line} an hour.")
    if outcome.missed:
        report.add(f"\n{len(outcome.missed)} samples are lacking; the first: {outcome.missed[0]}")
    for section in outcome.heaps:
        report.add(f"\n{section}")
    report.add(
        f"\n## Every series\n\n{len(judged)} of {len(growths)} are long enough to be judged."
    )
    report.add(f"\n{_SERIES_HEAD}")
    for name in sorted(judged):
        report.add(_row(name, judged[name]))
    return not any(wrong.values())


def _row(name: SeriesName, growth: SeriesGrowth) -> str:
    verdict = "**grows**" if growth.grows else "flat" if growth.is_flat else "noisy"
    shown = verdict if name.is_judged else f"({verdict.strip('*')}; not judged)"
    return (
        f"| {name.part} | {name.what} | {name.shown(growth.level)} "
        f"| {with_interval(name, growth)} | {name.shown(growth.allowed_per_h)} | {shown} |"
    )


def _write(series: Series, path: Path) -> None:
    content = {f"{name.part}: {name.what}": points for name, points in series.items()}
    path.write_text(json.dumps(content) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
