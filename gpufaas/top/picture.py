"""One frame: what the state is, as lines for a screen of some size; pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpufaas.top.bars import sparkline
from gpufaas.top.panels import PANELS, Panel, Row
from gpufaas.top.spans import BOLD, CYAN, DIM, GREEN, RED, REVERSED, YELLOW, Line, Span, cut, padded
from gpufaas.top.spans import plain as clean
from gpufaas.top.state import State
from gpufaas.top.words import clock, rate, seconds, share

_KEYS = "q quit   ←→ or 1-6 list   ↑↓ PgUp PgDn select   Enter open   Esc close"
_SPARK = 24
_HEAD_LINES = 8
_LISTED = 40


@dataclass(slots=True)
class View:
    """What the person at the keyboard looks at; `said` is an answer that was asked for."""

    panel: int = 0
    selected: dict[int, str] = field(default_factory=dict)
    top: dict[int, int] = field(default_factory=dict)
    opened: str | None = None
    scrolled: int = 0
    said: str = ""


def frame(state: State, trouble: str, view: View, width: int, height: int) -> list[list[Span]]:
    """Exactly `height` lines, none of them longer than `width`."""
    panel = PANELS[view.panel]
    lines: list[Line] = [*head(state, trouble, width), _tabs(state, view)]
    room = max(1, height - len(lines) - 1)
    lines += _opened(state, panel, view, room) if view.opened else _list(state, view, width, room)
    lines = lines[: height - 1]
    lines += [[] for _ in range(height - 1 - len(lines))]
    return [*(cut(line, width) for line in lines), padded([Span(_KEYS)], width, REVERSED)]


def once(state: State, trouble: str, width: int) -> list[list[Span]]:
    """Everything, one list below the other, for a pipe or a file."""
    lines: list[Line] = [*head(state, trouble, width)]
    for panel in PANELS:
        rows = list(panel.rows(state, width))
        lines += [[], [Span(f"{panel.name}: {panel.count(state)}", BOLD)]]
        if not rows:
            lines.append([Span(panel.empty, DIM)])
            continue
        lines += [[Span(panel.head(width), DIM)]] if panel.head(width) else []
        shown = rows if panel.name == "GPUs" else rows[:_LISTED]
        lines += [row.line for row in shown]
        if len(rows) > len(shown):
            lines.append([Span(f"and {len(rows) - len(shown)} more", DIM)])
    return [cut(line, width) for line in lines]


def head(state: State, trouble: str, width: int) -> list[Line]:
    """The scheduler, totals, the last minutes, and what is wrong."""
    scheduler, totals, queue = state["scheduler"], state["totals"], state["queue"]
    parameters = " ".join(f"{k}={v:g}" for k, v in state["policy"]["parameters"].items())
    first = [
        Span("gpufaas", BOLD),
        Span(f"  {clean(scheduler['leader']) or 'nobody'} leads, term {scheduler['term']}, "),
        Span(f"etcd {clean(scheduler['etcd'])}", RED if scheduler["etcd"] == "lost" else ""),
        Span("; policy "),
        Span(clean(state["policy"]["name"]), CYAN),
        Span(f" {clean(parameters)}".rstrip()),
        Span(f"   {clock(state['now'])}", DIM),
    ]
    waiting = queue["length"] + queue["local"]
    second = [
        Span(f"{rate(totals['rate'])} requests   waiting {queue['length']} +{queue['local']}"),
        Span("   hits ", DIM if not waiting else ""),
        Span(share(totals["hit_ratio"]), GREEN),
        Span(
            f"   p50 {seconds(totals['p50_s'])}  p95 {seconds(totals['p95_s'])}  "
            f"p99 {seconds(totals['p99_s'])}"
        ),
    ]
    third = [
        Span(
            f"{totals['requests']} ended, {totals['hits']} hits, {totals['misses']} misses "
            f"({totals['false_misses']} of them false), {totals['evictions']} evictions, "
        ),
        Span(f"{totals['failed']} failed", RED if totals["failed"] else ""),
    ]
    return [first, second, third, *_history(state["history"], width), _wrong(state, trouble)]


def _history(history: Mapping[str, Any], width: int) -> list[Line]:
    """Three series beside each other, as much of them as there is room for."""
    each = max(8, min(60, (width - 3 * _SPARK) // 3))
    line: list[Span] = []
    series = history["series"]
    for name, kind, most, shown in (
        ("requests/s", "throughput", None, rate),
        ("hits", "hit_ratio", 1.0, share),
        ("p95", "p95", None, seconds),
    ):
        values: Sequence[float | None] = series[kind]
        last = values[-1] if values else None
        spark = sparkline(values, each, most)
        line += [Span(f"{name} ", DIM), Span(f"{spark:<{each}}", CYAN), Span(f" {shown(last)}   ")]
    return [line]


def _wrong(state: State, trouble: str) -> Line:
    if trouble:
        return [Span(f"not fresh: {clean(trouble)}", f"{BOLD};{RED}")]
    alerts = state["alerts"]
    if not alerts:
        return [Span("nothing needs looking at", DIM)]
    more = f"  (and {len(alerts) - 1} more: 6)" if len(alerts) > 1 else ""
    style = RED if alerts[0]["level"] == "critical" else YELLOW
    return [Span(clean(alerts[0]["text"]), f"{BOLD};{style}"), Span(more, DIM)]


def _tabs(state: State, view: View) -> Line:
    line: list[Span] = []
    for number, panel in enumerate(PANELS):
        style = REVERSED if number == view.panel else ""
        line += [Span(f" {number + 1} {panel.name} {panel.count(state)} ", style), Span(" ")]
    return line


def rows_of(state: State, view: View, width: int) -> list[Row]:
    """What can be selected."""
    return list(PANELS[view.panel].rows(state, width))


def _list(state: State, view: View, width: int, room: int) -> list[Line]:
    panel = PANELS[view.panel]
    rows = rows_of(state, view, width)
    if not rows:
        return [[], [Span(panel.empty, DIM)]]
    lines: list[Line] = [[Span(panel.head(width), BOLD)]] if panel.head(width) else []
    room = max(1, room - len(lines))
    at = place_of(rows, view)
    top = view.top.get(view.panel, 0)
    top = max(0, min(max(at - room + 1, min(top, at)), len(rows) - room))
    view.top[view.panel] = top
    for number, row in enumerate(rows[top : top + room], start=top):
        lines.append(padded(row.line, width, REVERSED) if number == at else row.line)
    return lines


def place_of(rows: Sequence[Row], view: View) -> int:
    """Where the selected row is now; the first one, where it is no more."""
    key = view.selected.get(view.panel)
    return next((number for number, row in enumerate(rows) if row.key == key), 0)


def _opened(state: State, panel: Panel, view: View, room: int) -> list[Line]:
    assert view.opened is not None, "something is opened"
    lines = [*panel.detail(state, view.opened)]
    lines += [[Span(clean(text))] for text in view.said.splitlines()]
    view.scrolled = max(0, min(view.scrolled, len(lines) - room))
    return [[], *lines[view.scrolled : view.scrolled + room - 1]]
