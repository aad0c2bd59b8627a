"""Writes the compatibility page: one row a program, and the counts that sum them up."""

from collections.abc import Iterator, Mapping, Sequence

from tests.compat.run import Report, Verdict

GOOD_SHARE = 0.95
_INTRODUCTION = """\
# Compatibility

Made by `make compat`; do not edit. Every entry is a plain PyTorch program of
`tests/compat/programs/` that picks its device by `"cuda" if torch.cuda.is_available() else "cpu"`.
It runs once under plain Python on the CPU and once under `gpufaas exec`, and what both saved is
compared: equal means to the last bit, close within the tolerance of the dtype (1e-4 for float32).

The share is that of a program's operators which ran in graphs on the device; the rest ran in the
function's own process, for the reasons given with the number of calls. What touches only the CPU's
tensors does not count. Times are ratios to the plain run: of the whole program (which includes
starting a node, loading weights and tracing, {tracing}) and, for programs that
measure it, of one warm call.
"""
_WORDS = {
    Verdict.EQUAL: "equal",
    Verdict.CLOSE: "close",
    Verdict.REFUSED: "refuses",
    Verdict.DIFFERENT: "**differs**",
    Verdict.FAILED: "**fails**",
}
_TRACING = {
    "wait": "which the first calls wait for",
    "background": "which goes on in the background",
}


def page(reports: Sequence[Report], tracing: str, machine: str) -> str:
    """The whole page in Markdown."""
    lines = [
        _INTRODUCTION.format(tracing=_TRACING[tracing]),
        *summary(reports),
        "",
        f"Measured on {machine}.",
        "",
        "| program | results | in graphs | local calls, by reason | program | warm call |",
        "| --- | --- | ---: | --- | ---: | ---: |",
        *map(_row, reports),
        *_troubles(reports),
    ]
    return "\n".join(lines).rstrip() + "\n"


def summary(reports: Sequence[Report]) -> Iterator[str]:
    """How many agree, refuse and differ, and how many run in graphs, as a list."""
    counts = {verdict: sum(report.verdict is verdict for report in reports) for verdict in Verdict}
    agree = counts[Verdict.EQUAL] + counts[Verdict.CLOSE]
    yield f"- {len(reports)} programs: {agree} agree ({counts[Verdict.EQUAL]} to the last bit),"
    yield (
        f"  {counts[Verdict.REFUSED]} refuse clearly, {counts[Verdict.DIFFERENT]} differ,"
        f" {counts[Verdict.FAILED]} fail."
    )
    shares = [share for report in reports if (share := _share_of_model(report)) is not None]
    good = sum(share >= GOOD_SHARE for share in shares)
    part = good / len(shares) if shares else 0.0
    yield (
        f"- {good} of {len(shares)} programs with a model ({part:.0%}) spend at least"
        f" {GOOD_SHARE:.0%} of their operators in graphs."
    )


def _share_of_model(report: Report) -> float | None:
    """Its share in graphs, if it has a model and ran to its end; 0 where nothing was counted."""
    if not report.entry.has_model or report.remote is None or report.remote.status != 0:
        return None
    stats = report.remote.stats
    return (stats.share_in_graphs or 0.0) if stats is not None else 0.0


def _row(report: Report) -> str:
    remote = report.remote
    stats = remote.stats if remote is not None else None
    share = stats.share_in_graphs if stats is not None else None
    cells = [
        f"`{report.entry.name}`",
        _WORDS[report.verdict],
        "" if share is None else f"{share:.1%}",
        "" if stats is None else _reasons(stats.local_calls),
        "" if remote is None else _ratio(remote.took_s, report.native.took_s),
        "" if remote is None else _ratio(remote.call_ms, report.native.call_ms),
    ]
    return f"| {' | '.join(cells)} |"


def _reasons(local_calls: Mapping[str, int]) -> str:
    ordered = sorted(local_calls.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{reason.replace('|', '/')} {count}" for reason, count in ordered if count)


def _ratio(ours: float | None, native: float | None) -> str:
    return f"{ours / native:.2f}" if ours is not None and native else ""


def _troubles(reports: Sequence[Report]) -> Iterator[str]:
    """What the refusals say, and what went wrong."""
    said = [report for report in reports if report.found]
    if said:
        yield from ("", "## What refusals and failures said", "")
    for report in said:
        words = report.found[0].replace("`", "'").replace("gpufaas: ", "")
        yield f"- `{report.entry.name}`: {words}"
