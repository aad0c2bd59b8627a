"""A recorded run beside its simulation under other policies, for `replay`."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from gpufaas.errors import CommandError
from gpufaas.options.configuration import numbers
from gpufaas.output.cells import short_seconds
from scheduler import policies
from scheduler.model.errors import BadRecording
from scheduler.recording import Beginning, RecordedStep
from scheduler.sim.comparison import Comparison, Outlook, TrafficFigures, compare

Choice = tuple[str, Mapping[str, float]]

_ROWS: tuple[tuple[str, Callable[[TrafficFigures], str]], ...] = (
    ("requests", lambda found: str(found.requests)),
    ("completed", lambda found: str(found.completed)),
    ("ended otherwise", lambda found: str(sum(found.ended_otherwise.values()))),
    ("unfinished", lambda found: str(found.unfinished)),
    ("leases", lambda found: str(found.leases)),
    ("hit ratio", lambda found: f"{found.hit_ratio:.3f}"),
    ("false misses", lambda found: str(found.false_misses)),
    ("evictions", lambda found: str(found.evictions)),
    ("on another GPU", lambda found: str(found.elsewhere)),
    ("average latency", lambda found: short_seconds(found.avg_latency_s)),
    ("median", lambda found: short_seconds(found.p50_s)),
    ("95th percentile", lambda found: short_seconds(found.p95_s)),
    ("99th percentile", lambda found: short_seconds(found.p99_s)),
)
_NEAR = 0.1


def chosen_policies(names: Sequence[str], parameters: str | None) -> list[Choice]:
    """The named policies, or all, each with the parameters that it has."""
    asked = [name for text in names for name in text.split(",") if name]
    selected = policies.available() if "all" in asked else tuple(dict.fromkeys(asked))
    if not selected:
        raise CommandError(f"which policy? one of {', '.join(policies.available())}, or all")
    for name in asked:
        if "=" in name:
            raise CommandError(
                f"{name!r} is no policy's name: `gpufaas policy set` sets parameters of a "
                "scheduler, `gpufaas replay --parameters` of a study"
            )
    try:
        given = numbers(parameters or "")
    except ValueError as error:
        raise CommandError(f"parameters {parameters!r}: {error}") from error
    for parameter in given:
        if not any(policies.takes(name, parameter) for name in selected):
            # Raises an error that lists its parameters.
            policies.make(selected[0], {parameter: given[parameter]})
    chosen: list[Choice] = []
    for name in selected:
        own = {key: value for key, value in given.items() if policies.takes(name, key)}
        policies.make(name, own)
        chosen.append((name, own))
    return chosen


def compare_policies(
    path: Path, entries: Iterable[Beginning | RecordedStep], chosen: Sequence[Choice]
) -> Comparison:
    """The comparison; BadRecording names the file."""
    try:
        return compare(entries, chosen)
    except BadRecording as error:
        text = str(error)
        raise BadRecording(text if text.startswith(str(path)) else f"{path}: {text}") from error


def as_json(comparison: Comparison) -> str:
    return json.dumps(
        asdict(comparison) | {"assumptions": list(_assumptions(comparison))}, indent=1
    )


def side_by_side(comparison: Comparison) -> str:
    outlooks = [comparison.recorded, *comparison.others]
    columns = [comparison.happened, *(each.figures for each in outlooks)]
    heads = ["happened", f"{_name(comparison)} again", *(each.policy for each in comparison.others)]
    widths = [max(len(head), 9) + 2 for head in heads]
    lines = [_line("", heads, widths)]
    lines.append("-" * len(lines[0]))
    lines += [_line(name, [shown(each) for each in columns], widths) for name, shown in _ROWS]
    lines += ["", _deviation(comparison)]
    lines += [f"{each.policy}: {_written(each)}" for each in comparison.others if each.parameters]
    lines += ["", "Assumed:", *(f"- {each}" for each in _assumptions(comparison))]
    return "\n".join(lines)


def _name(comparison: Comparison) -> str:
    return "recorded" if comparison.policy_changes else comparison.recorded.policy


def _line(name: str, cells: Sequence[str], widths: Sequence[int]) -> str:
    shown = (f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
    return f"{name:<16}" + "".join(shown)


def _deviation(comparison: Comparison) -> str:
    real, simulated = comparison.happened, comparison.recorded.figures
    if not real.avg_latency_s:
        return "Nothing completed in the recording, so the model's error is unknown."
    off = simulated.avg_latency_s / real.avg_latency_s - 1.0
    points = 100 * (simulated.hit_ratio - real.hit_ratio)
    text = (
        f"The same policy, simulated, is {100 * off:+.1f} % off in average latency and "
        f"{points:+.1f} points in hit ratio; {simulated.elsewhere} requests went to another GPU."
    )
    if abs(off) > _NEAR:
        text += " Compare the simulated columns with each other, not with what happened."
    return text


def _written(outlook: Outlook) -> str:
    return " ".join(f"{name}={value:g}" for name, value in outlook.parameters.items())


def _assumptions(comparison: Comparison) -> Iterator[str]:
    yield (
        "Requests arrive, and callers give up, at the same times after arrival as recorded; what "
        "a caller does next does not depend on how long it waited."
    )
    yield "GPUs come and go, and people pin, prefetch and evict, at the recorded times."
    yield (
        "A request holds its lease as long as recorded, counted from when its models were loaded; "
        f"one that never had a whole lease ({comparison.unmeasured_holds} here), as requests "
        "like it did on average."
    )
    if comparison.callers_wait:
        yield "Callers wait for their models."
    else:
        yield (
            "Callers do not wait for their models: over a tenth of the recorded callers did not, "
            "so that loads delay no caller here."
        )
    yield (
        "A load takes what loads of that model from that tier took on average; where none was "
        "measured, what the model's profile expects."
    )
    yield (
        "On another type of GPU a request takes longer or shorter as its runs do, where runs of "
        "that model were measured on both."
    )
    yield "A model that never loaded fails to load; a request whose GPU work failed fails again."
    if comparison.policy_changes:
        yield (
            f"The policy was changed {comparison.policy_changes} times; the column `recorded "
            "again` does so too, the others do not."
        )
    if comparison.terms > 1:
        yield f"Each of the {comparison.terms} terms is simulated separately."
    yield (
        "Callers that leave after the last request's end belong to the recording's end. Requests "
        "that had not ended are simulated and not counted."
    )
