"""`gpufaas top`: frames of every size, and nothing in them that would steer the terminal."""

import asyncio
import json
import re
from itertools import product
from typing import Any

from common.foreign_text import plain
from gateway_ext.ui.state import Series
from gpufaas.output.cells import seconds
from gpufaas.top.panels import PANELS
from gpufaas.top.screen import ScreenView, frame, full_listing, rows_of, selected_index
from gpufaas.top.styled_text import StyledText, cut, memory_bar, padded, painted, sparkline
from gpufaas.top.terminal import pressed_keys
from scheduler.policies import describe
from tests.kit.outcomes import outcome
from tests.kit.page.generated_cluster import GeneratedCluster, empty

GIB = 1 << 30


def state_of(cluster: GeneratedCluster) -> dict[str, Any]:
    """As /ui/state has it."""
    look = asyncio.run(cluster.look())
    sections = {section: list(items.values()) for section, items in look.items.items()}
    state = {"now": 1e9, **look.whole, **sections, "history": Series().shown()}
    found: dict[str, Any] = json.loads(json.dumps(state))
    return found


STATE = state_of(GeneratedCluster(5, 9))
NOTHING = state_of(empty())


def text_of(lines: list[list[StyledText]]) -> str:
    return "\n".join(painted(line, colours=False) for line in lines)


def test_frame_fills_the_screen_and_no_more() -> None:
    def frame_size(state: dict[str, Any], view: ScreenView, width: int, height: int) -> list[int]:
        lines = frame(state, "trouble", view, width, height)
        return [len(lines), max(sum(len(span.text) for span in line) for line in lines)]

    wrong = []
    sizes = [(140, 40), (80, 24), (20, 5), (1, 1), (300, 3)]
    states = {"a cluster": STATE, "an empty one": NOTHING}
    for panel, (width, height), where in product(range(len(PANELS)), sizes, states):
        for opened in (None, "no such thing" if panel < 5 else "0"):
            view = ScreenView(panel=panel, opened=opened, scrolled=7, explanation="some\nlines")
            found = outcome(frame_size, states[where], view, width, height)
            if not isinstance(found, list) or found[0] != height or found[1] > width:
                wrong.append((panel, (width, height), where, opened, found))
    assert wrong == []


def test_frame_of_an_empty_cluster_names_the_next_command() -> None:
    text = text_of(frame(NOTHING, "", ScreenView(), 140, 40))
    assert "gpufaas gpu-manager --scheduler" in text
    text = text_of(frame(NOTHING, "", ScreenView(panel=1), 140, 40))
    assert "faas-cli deploy" in text


def test_everything_is_printed_once() -> None:
    text = text_of(full_listing(STATE, "", 160))
    for gpu in STATE["gpus"]:
        assert gpu["id"] in text
    for function in STATE["functions"]:
        assert function["id"] in text
    assert "; policy lalbo3   " in text  # with the defaults
    assert "\x1b" not in text


def test_printed_lines_are_cut_for_a_terminal_alone() -> None:
    narrow, whole = full_listing(STATE, "", 60), full_listing(STATE, "", 60, whole=True)
    assert max(len("".join(part.text for part in line)) for line in narrow) == 60
    rules = {one["rule"] for one in STATE["decisions"]}
    assert rules
    assert all(rule in text_of(whole) for rule in rules)
    assert all(function["image"] in text_of(whole) for function in STATE["functions"])


def test_selection_stays_with_its_item_and_in_sight() -> None:
    cluster = GeneratedCluster(60, 5)
    state = state_of(cluster)
    view = ScreenView(selected={0: state["gpus"][50]["id"]})
    shown = text_of(frame(state, "", view, 140, 20))
    assert state["gpus"][50]["id"] in shown
    assert state["gpus"][0]["id"] + " " not in shown
    del state["gpus"][3]
    assert selected_index(rows_of(state, view, 140), view) == 49
    view.selected[0] = "gone"
    assert selected_index(rows_of(state, view, 140), view) == 0


def test_gpu_is_opened_with_its_models() -> None:
    gpu = STATE["gpus"][0]
    text = text_of(frame(STATE, "", ScreenView(opened=gpu["id"]), 140, 40))
    assert gpu["kind"] in text
    for resident in gpu["residents"]:
        assert resident["model"] in text


def test_trouble_is_reported_in_front_of_alerts() -> None:
    assert "not fresh: it is away" in text_of(frame(STATE, "it is away", ScreenView(), 140, 40))
    assert STATE["alerts"][0]["text"] in text_of(frame(STATE, "", ScreenView(), 140, 40))


def test_other_alerts_are_by_key_or_below() -> None:
    state = {**STATE, "alerts": [STATE["alerts"][0]] * 10}
    assert "  (and 9 more: key 6)" in text_of(frame(state, "", ScreenView(), 240, 40))
    assert "  (and 9 more, below)" in text_of(full_listing(state, "", 240))


def test_policy_is_shown_with_the_parameters_that_are_not_the_defaults() -> None:
    parameters = {**describe("gain").parameters, "overlap": 0}
    assert len(parameters) > 1
    shown = {**STATE, "policy": {"name": "gain", "parameters": parameters}}
    assert "; policy gain overlap=0   " in text_of(full_listing(shown, "", 160))
    shown["policy"] = {"name": "of-tomorrow", "parameters": {"a": 1, "b": 2}}
    assert "; policy of-tomorrow a=1 b=2   " in text_of(full_listing(shown, "", 160))


def test_names_cannot_steer_the_terminal() -> None:
    evil = "\x1b]0;owned\x07\x1b[2J\r\nnext"
    state = json.loads(json.dumps(STATE).replace('"resnet"', json.dumps(evil)))
    state["scheduler"]["leader"] = state["gpus"][0]["id"] = state["alerts"][0]["text"] = evil
    for panel in range(len(PANELS)):
        lines = frame(state, evil, ScreenView(panel=panel), 140, 40)
        shown = "".join(painted(line, colours=True) for line in lines)
        assert "owned" in shown
        assert re.sub(r"\x1b\[[0-9;]*m", "", shown).isprintable()
    assert plain(evil).isprintable()


# -- small parts --------------------------------------------------------------------------------


def gpu(**more: Any) -> dict[str, Any]:
    """Half of it is one model's."""
    resident = {
        "model": "m", "label": "bert", "bytes": 8 * GIB, "busy": True, "loading": False,
        "pinned": True,
    }  # fmt: skip
    return {"total_bytes": 16 * GIB, "withheld_bytes": 0, "residents": [resident]} | more


def test_memory_bar_is_drawn_to_scale() -> None:
    bar = memory_bar(gpu(), 40)
    assert [len(span.text) for span in bar] == [20, 0, 20]
    assert bar[0].text.startswith("*!bert")
    taken = memory_bar(gpu(withheld_bytes=4 * GIB), 40)
    assert [len(span.text) for span in taken] == [20, 10, 10]
    assert sum(len(span.text) for span in memory_bar(gpu(total_bytes=8 * GIB), 7)) == 7
    many = gpu(residents=[gpu()["residents"][0] | {"bytes": GIB // 4} for _ in range(64)])
    assert sum(len(span.text) for span in memory_bar(many, 40)) == 40


def test_sparkline_shows_the_latest_and_gaps() -> None:
    assert sparkline([0.0, 1.0, None, 2.0], 3) == "▅ █"
    assert sparkline([], 3) == ""
    assert sparkline([0.0, 0.0], 5) == "▁▁"
    assert sparkline([0.5], 5, 1.0) == "▅"


def test_lines_are_cut_and_padded() -> None:
    line = [StyledText("abc", "1"), StyledText("def")]
    assert cut(line, 4) == [StyledText("abc", "1"), StyledText("d")]
    assert padded(line, 8, "7") == [
        StyledText("abc", "1;7"),
        StyledText("def", "7"),
        StyledText("  ", "7"),
    ]
    assert painted([StyledText("a", "1"), StyledText("b")], colours=True) == "\x1b[1ma\x1b[0mb"
    assert painted([StyledText("a ", "1")], colours=False) == "a"


def test_keys_are_distinguished() -> None:
    pressed = "\x1b[A\x1bq\x1b[6~jx\r\x1b[Z3"
    assert list(pressed_keys(pressed)) == [
        "up", "escape", "quit", "page down", "down", "x", "enter", "left", "3",
    ]  # fmt: skip


def test_durations_have_three_digits() -> None:
    assert [seconds(value) for value in (None, 0.0123, 1.234, 75.0, 7500.0)] == [
        "-", "12.3 ms", "1.23 s", "1 min 15 s", "2 h 5 min",
    ]  # fmt: skip
