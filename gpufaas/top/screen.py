"""One frame: the state as lines for a screen of some size; pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.foreign_text import plain as clean
from gpufaas.output.cells import clock, rate, seconds, share
from gpufaas.output.cluster_text import in_force_text
from gpufaas.top.panels import PANELS, ListPanel, ListRow, State
from gpufaas.top.styled_text import (
    BOLD,
    CYAN,
    DIM,
    GREEN,
    RED,
    REVERSED,
    YELLOW,
    StyledLine,
    StyledText,
    cut,
    padded,
    sparkline,
)

_KEYS = "q quit   ←→ or 1-6 list   ↑↓ PgUp PgDn select   Enter open   Esc close"
_SPARK = 24
_LISTED = 40


@dataclass(slots=True)
class ScreenView:
    """The panel, rows and details that are shown; `explanation` is a requested text."""

    panel: int = 0
    selected: dict[int, str] = field(default_factory=dict)
    top: dict[int, int] = field(default_factory=dict)
    opened: str | None = None
    scrolled: int = 0
    explanation: str = ""


def frame(
    state: State, trouble: str, view: ScreenView, width: int, height: int
) -> list[list[StyledText]]:
    """Exactly `height` lines of at most `width` characters."""
    panel = PANELS[view.panel]
    others = f": key {len(PANELS)}"  # the alerts are the last list
    lines: list[StyledLine] = [*head(state, trouble, width, others), _tabs(state, view)]
    room = max(1, height - len(lines) - 1)
    lines += _opened(state, panel, view, room) if view.opened else _list(state, view, width, room)
    lines = lines[: height - 1]
    lines += [[] for _ in range(height - 1 - len(lines))]
    return [*(cut(line, width) for line in lines), padded([StyledText(_KEYS)], width, REVERSED)]


def full_listing(
    state: State, trouble: str, width: int, *, whole: bool = False
) -> list[list[StyledText]]:
    """All lists below each other; whole lines for a pipe or a file."""
    lines: list[StyledLine] = [*head(state, trouble, width, ", below")]
    for panel in PANELS:
        rows = list(panel.rows(state, width))
        lines += [[], [StyledText(f"{panel.name}: {panel.count(state)}", BOLD)]]
        if not rows:
            lines.append([StyledText(panel.empty, DIM)])
            continue
        lines += [[StyledText(panel.head(width), DIM)]] if panel.head(width) else []
        shown = rows if panel.name == "GPUs" else rows[:_LISTED]
        lines += [row.line for row in shown]
        if len(rows) > len(shown):
            lines.append([StyledText(f"and {len(rows) - len(shown)} more", DIM)])
    return [list(line) if whole else cut(line, width) for line in lines]


def head(state: State, trouble: str, width: int, others: str) -> list[StyledLine]:
    """The scheduler, totals, the last minutes, and the first alert, with where others are."""
    scheduler, totals, queue = state["scheduler"], state["totals"], state["queue"]
    shown = {"policy": state["policy"]["name"], "parameters": state["policy"]["parameters"]}
    policy, _, parameters = in_force_text(shown).partition(" ")
    leader = clean(scheduler["leader"]) or "no scheduler"
    first = [
        StyledText("gpufaas", BOLD),
        StyledText(f"  {leader} leads, term {scheduler['term']}, "),
        StyledText(f"etcd {clean(scheduler['etcd'])}", RED if scheduler["etcd"] == "lost" else ""),
        StyledText("; policy "),
        StyledText(clean(policy), CYAN),
        StyledText(f" {clean(parameters)}".rstrip()),
        StyledText(f"   {clock(state['now'])}", DIM),
    ]
    waiting = f"waiting {queue['length']} +{queue['local']}"
    second = [
        StyledText(f"{rate(totals['rate'])} requests   {waiting}"),
        StyledText("   hits ", "" if queue["length"] + queue["local"] else DIM),
        StyledText(share(totals["hit_ratio"]), GREEN),
        StyledText(
            f"   p50 {seconds(totals['p50_s'])}  p95 {seconds(totals['p95_s'])}  "
            f"p99 {seconds(totals['p99_s'])}"
        ),
    ]
    third = [
        StyledText(
            f"{totals['requests']} ended, {totals['hits']} hits, {totals['misses']} misses "
            f"({totals['false_misses']} of them false), {totals['evictions']} evictions, "
        ),
        StyledText(f"{totals['failed']} failed", RED if totals["failed"] else ""),
    ]
    history = _history(state["history"], width)
    return [first, second, third, history, _alert_line(state, trouble, others)]


def _history(history: Mapping[str, Any], width: int) -> StyledLine:
    cells = max(8, min(60, (width - 3 * _SPARK) // 3))
    line: list[StyledText] = []
    series = history["series"]
    for name, kind, most, shown in (
        ("requests/s", "throughput", None, rate),
        ("hits", "hit_ratio", 1.0, share),
        ("p95", "p95", None, seconds),
    ):
        values: Sequence[float | None] = series[kind]
        last = values[-1] if values else None
        spark = sparkline(values, cells, most)
        line += [
            StyledText(f"{name} ", DIM),
            StyledText(f"{spark:<{cells}}", CYAN),
            StyledText(f" {shown(last)}   "),
        ]
    return line


def _alert_line(state: State, trouble: str, others: str) -> StyledLine:
    if trouble:
        return [StyledText(f"not fresh: {clean(trouble)}", f"{BOLD};{RED}")]
    alerts = state["alerts"]
    if not alerts:
        return [StyledText("nothing needs looking at", DIM)]
    more = f"  (and {len(alerts) - 1} more{others})" if len(alerts) > 1 else ""
    style = RED if alerts[0]["level"] == "critical" else YELLOW
    return [StyledText(clean(alerts[0]["text"]), f"{BOLD};{style}"), StyledText(more, DIM)]


def _tabs(state: State, view: ScreenView) -> StyledLine:
    line: list[StyledText] = []
    for number, panel in enumerate(PANELS):
        style = REVERSED if number == view.panel else ""
        name = f" {number + 1} {panel.name} {panel.count(state)} "
        line += [StyledText(name, style), StyledText(" ")]
    return line


def rows_of(state: State, view: ScreenView, width: int) -> list[ListRow]:
    return list(PANELS[view.panel].rows(state, width))


def _list(state: State, view: ScreenView, width: int, room: int) -> list[StyledLine]:
    panel = PANELS[view.panel]
    rows = rows_of(state, view, width)
    if not rows:
        return [[], [StyledText(panel.empty, DIM)]]
    lines: list[StyledLine] = [[StyledText(panel.head(width), BOLD)]] if panel.head(width) else []
    room = max(1, room - len(lines))
    at = selected_index(rows, view)
    top = view.top.get(view.panel, 0)
    top = max(0, min(max(at - room + 1, min(top, at)), len(rows) - room))
    view.top[view.panel] = top
    for number, row in enumerate(rows[top : top + room], start=top):
        lines.append(padded(row.line, width, REVERSED) if number == at else row.line)
    return lines


def selected_index(rows: Sequence[ListRow], view: ScreenView) -> int:
    """The index of the selected row; 0 if the row has gone."""
    key = view.selected.get(view.panel)
    return next((number for number, row in enumerate(rows) if row.key == key), 0)


def _opened(state: State, panel: ListPanel, view: ScreenView, room: int) -> list[StyledLine]:
    assert view.opened is not None, "a row is opened"
    lines = [*panel.detail(state, view.opened)]
    lines += [[StyledText(clean(text))] for text in view.explanation.splitlines()]
    view.scrolled = max(0, min(view.scrolled, len(lines) - room))
    return [[], *lines[view.scrolled : view.scrolled + room - 1]]
