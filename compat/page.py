"""Writes the compatibility page: one row a program, and the counts that sum them up."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from compat.rows import Row
from compat.run import Verdict

GOOD_SHARE = 0.95
_INTRODUCTION = """\
# Compatibility

Made by `make compat`; do not edit. Every entry is a plain PyTorch program of
`compat/programs/` that picks its device by `"cuda" if torch.cuda.is_available() else "cpu"`.
It runs once under plain Python on the CPU and once under `gpufaas exec`, and what both saved is
compared: equal means to the last bit, close within the tolerance of the dtype (1e-4 for float32).

A refusal is clear if it is the shim's own error, which names a remedy, or CUDA's.

The share is that of a program's operators which ran in graphs on the device; the rest ran in the
function's own process, for the reasons given with the number of calls. What touches only the CPU's
tensors does not count. Times are ratios to the plain run: of the whole program, without its imports
(which includes loading weights and tracing, {tracing}), and, for programs that measure it, of the
time until the first answer was there and of one warm call.
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


def page(rows: Sequence[Row], tracing: str, machine: str) -> str:
    """The whole page in Markdown."""
    lines = [
        _INTRODUCTION.format(tracing=_TRACING[tracing]),
        *summary(rows),
        "",
        f"Measured on {machine}.",
        "",
        "| program | results | in graphs | local calls, by reason | program"
        " | first answer | first answer, ms | warm call |",
        "| --- | --- | ---: | --- | ---: | ---: | ---: | ---: |",
        *map(_line, rows),
        *_troubles(rows),
    ]
    return "\n".join(lines).rstrip() + "\n"


def summary(rows: Sequence[Row]) -> Iterator[str]:
    """How many agree, refuse and differ, and how many run in graphs, as a list."""
    counts = {verdict: sum(row.verdict is verdict for row in rows) for verdict in Verdict}
    agree = counts[Verdict.EQUAL] + counts[Verdict.CLOSE]
    yield f"- {len(rows)} programs: {agree} agree ({counts[Verdict.EQUAL]} to the last bit),"
    yield (
        f"  {counts[Verdict.REFUSED]} refuse clearly, {counts[Verdict.DIFFERENT]} differ,"
        f" {counts[Verdict.FAILED]} fail."
    )
    called = [row for row in rows if row.has_model and row.ended_well]
    shares = [row.in_graphs or 0.0 for row in called if not row.trains]
    good = sum(share >= GOOD_SHARE for share in shares)
    part = good / len(shares) if shares else 0.0
    yield (
        f"- {good} of {len(shares)} programs with a model ({part:.0%}) spend at least"
        f" {GOOD_SHARE:.0%} of their operators in graphs."
    )
    training = len(called) - len(shares)
    if training:
        train = "1 program trains its" if training == 1 else f"{training} programs train their"
        yield f"- {train} model, which runs in the function's process and is not counted there."
    ratios = [ratio for row in rows if (ratio := _first_ratio(row)) is not None]
    if ratios:
        yield (
            f"- The first answer takes {median(ratios):.1f} times as long as plainly"
            f" (the median of {len(ratios)} programs that measure it)."
        )


def _first_ratio(row: Row) -> float | None:
    if row.first_ms is None or not row.native_first_ms:
        return None
    return row.first_ms / row.native_first_ms


def _line(row: Row) -> str:
    cells = [
        f"`{row.program}`",
        _WORDS[row.verdict],
        "" if row.in_graphs is None else f"{row.in_graphs:.1%}",
        _reasons(row.local),
        _ratio(row.exec_s, row.native_s),
        _ratio(row.first_ms, row.native_first_ms),
        "" if row.first_ms is None else f"{row.first_ms:.0f}",
        _ratio(row.call_ms, row.native_call_ms),
    ]
    return f"| {' | '.join(cells)} |"


def _reasons(local_calls: Mapping[str, int]) -> str:
    ordered = sorted(local_calls.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{reason.replace('|', '/')} {count}" for reason, count in ordered if count)


def _ratio(ours: float | None, native: float | None) -> str:
    return f"{ours / native:.2f}" if ours is not None and native else ""


def _troubles(rows: Sequence[Row]) -> Iterator[str]:
    """What the refusals say, and what went wrong."""
    said = [row for row in rows if row.words]
    if said:
        yield from ("", "## What refusals and failures said", "")
    for row in said:
        words = row.words[0].replace("`", "'").replace("gpufaas: ", "")
        yield f"- `{row.program}`: {words}"
