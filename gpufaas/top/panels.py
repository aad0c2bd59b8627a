"""The lists of the page: GPUs, functions, queue, decisions, dead letters, alerts; pure."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from common.foreign_text import plain
from common.numerals import format_size as size
from gpufaas.output.cells import clock, rate, seconds, share
from gpufaas.output.cluster_text import hosting_text
from gpufaas.top.styled_text import (
    BOLD,
    CYAN,
    DIM,
    GREEN,
    RED,
    YELLOW,
    StyledLine,
    StyledText,
    memory_bar,
)

State = Mapping[str, Any]  # of the page: docs/page.md
Item = Mapping[str, Any]

_STATES = {"busy": GREEN, "idle": DIM, "draining": YELLOW, "silent": RED}
_BAR, _LEAST_BAR = 0.45, 12
_RESIDENT_HEAD = f"{'MODEL':<36}{'FUNCTION':<22}{'SIZE':<12}{'USED':<14}{'USES':>6}  RUNTIME"


class ListRow(NamedTuple):
    """One line of a list, with the key of its item."""

    key: str
    line: StyledLine


class ListPanel(NamedTuple):
    """A list: its name, item count, head and rows for a width, and one item's details."""

    name: str
    count: Callable[[State], int]
    head: Callable[[int], str]
    rows: Callable[[State, int], Iterator[ListRow]]
    detail: Callable[[State, str], list[StyledLine]]
    empty: str


# -- GPUs ---------------------------------------------------------------------------------------


def _bar_width(width: int) -> int:
    return max(_LEAST_BAR, int(width * _BAR))


def _gpus_head(width: int) -> str:
    return f"{'GPU':<22}{'STATE':<9}{'MEMORY':<{_bar_width(width) + 1}}{'USED':<21}QUEUE  NOW"


def _gpus(state: State, width: int) -> Iterator[ListRow]:
    for gpu in state["gpus"]:
        used = f"{size(gpu['used_bytes'])} of {size(gpu['total_bytes'])}"
        now = ", ".join(plain(lease["function"] or "?") for lease in gpu["leases"])
        line = [
            StyledText(f"{_short(gpu['id'], 21):<22}"),
            StyledText(f"{plain(gpu['state']):<9}", _STATES.get(gpu["state"], "")),
            *memory_bar(gpu, _bar_width(width)),
            StyledText(f" {used:<21}{gpu.get('queue_length', len(gpu['queue'])):>5}  "),
            StyledText(now, CYAN),
        ]
        yield ListRow(gpu["id"], line)


def _gpu(state: State, key: str) -> list[StyledLine]:
    gpu = _item(state["gpus"], "id", key)
    if gpu is None:
        return [[StyledText(f"{plain(key)} is gone", RED)]]
    now_s = state["now"]
    where = f"  {plain(gpu['kind'])} on {plain(gpu['node'])}"
    use = (
        f"{gpu['state']}, {size(gpu['used_bytes'])} of {size(gpu['total_bytes'])} used, "
        f"{size(gpu['withheld_bytes'])} by others; busy {share(gpu['utilisation'])} of "
        "the last minute"
    )
    lines: list[StyledLine] = [
        [StyledText(plain(gpu["id"]), BOLD), StyledText(where)],
        *([StyledText(use)], [], [StyledText(_RESIDENT_HEAD, BOLD)]),
    ]
    for resident in reversed(gpu["residents"]):
        marks = [name for name in ("busy", "loading", "pinned") if resident[name]]
        ago = seconds(max(0.0, now_s - resident["last_used_s"])) + " ago"
        text = (
            f"{_short(resident['model'], 35):<36}{_short(resident['label'], 21):<22}"
            f"{size(resident['bytes']):<12}{ago:<14}{resident['uses']:>6}  "
            f"{plain(hosting_text(resident)):<18}{' '.join(marks)}"
        )
        lines.append([StyledText(text)])
    lines += [[], [StyledText("LEASES", BOLD)]]
    lines += [_lease(lease, now_s) for lease in gpu["leases"]] or [[StyledText("none", DIM)]]
    lines += [[], [StyledText("WAITING FOR IT", BOLD)]]
    waiting = (f"{plain(each['request'])}  {plain(each['function'])}" for each in gpu["queue"])
    return lines + ([[StyledText(text)] for text in waiting] or [[StyledText("nobody", DIM)]])


def _lease(lease: Item, now_s: float) -> StyledLine:
    since_s, end_s = lease["since_s"], lease["expected_end_s"]
    since = "" if since_s is None else f" for {seconds(max(0.0, now_s - since_s))}"
    left = "" if end_s is None else f", expected to end in {seconds(max(0.0, end_s - now_s))}"
    who = f"{plain(lease['request'] or '?')}  {plain(lease['function'] or 'a prefetch')}"
    return [StyledText(f"{who}{since}{left}{_given(lease)}")]


def _given(lease: Item) -> str:
    """The slots and the configuration of a lease that is not one request on one slot."""
    batch, slots = lease.get("batch"), lease.get("slots", 1)
    if batch is None:
        return f", on {slots} slots" if slots > 1 else ""
    return f", a batch of {batch} with vCPUs: {lease['vcpus']}, slots: {slots}"


# -- functions ----------------------------------------------------------------------------------


_FUNCTIONS_HEAD = (
    f"{'FUNCTION':<34}{'REPLICAS':>9}{'IN FLIGHT':>11}{'CALLS':>10}{'5XX':>7}{'RATE':>9}"
    f"{'P95':>10}{'GPU TIME':>14}  IMAGE"
)


def _functions(state: State, _width: int) -> Iterator[ListRow]:
    """The functions, those with the most GPU time first."""
    for function in sorted(
        state["functions"], key=lambda function: (-function["gpu_seconds"], function["id"])
    ):
        errors = StyledText(f"{function['errors']:>7}", RED if function["errors"] else "")
        head = f"{_short(function['id'], 33):<34}{function['replicas']:>5}/{function['wanted']:<3}"
        line = [
            StyledText(f"{head}{function['in_flight']:>11}{function['calls']:>10}"),
            errors,
            StyledText(f"{rate(function['rate']):>9}{seconds(function['p95_s']):>10}"),
            StyledText(f"{seconds(function['gpu_seconds']):>14}", CYAN if function["gpu"] else DIM),
            StyledText(f"  {plain(function['image'])}", DIM),
        ]
        yield ListRow(function["id"], line)


def _function(state: State, key: str) -> list[StyledLine]:
    function = _item(state["functions"], "id", key)
    return _facts(function, 14) if function else [[StyledText(f"{plain(key)} is gone", RED)]]


# -- queue, decisions, jobs, alerts ---------------------------------------------------------------


_QUEUE_HEAD = f"{'REQUEST':<44}{'FUNCTION':<30}{'WAITED':>10}{'PASSED OVER':>13}  MODELS"


def _queue(state: State, _width: int) -> Iterator[ListRow]:
    for request in state["queue"]["head"]:
        models = ", ".join(plain(model) for model in request["models"])
        text = (
            f"{_short(request['request'], 43):<44}{_short(request['function'], 29):<30}"
            f"{seconds(request['waited_s']):>10}{request['visits']:>13}  {models}"
        )
        yield ListRow(request["request"], [StyledText(text)])


def _queued(state: State, key: str) -> list[StyledLine]:
    request = _item(state["queue"]["head"], "request", key)
    return _facts(request, 12) if request else [[StyledText(f"{plain(key)} no longer waits", DIM)]]


_DECISIONS_HEAD = (
    f"{'AT':<10}{'FUNCTION':<26}{'GPU':<22}{'':<12}{'WAITED':>10}{'LOAD':>10}{'RUN':>10}"
    f"  {'OUTCOME':<11}RULE"
)


def _decisions(state: State, _width: int) -> Iterator[ListRow]:
    for decision in state["decisions"]:
        result = "hit" if decision["hit"] else "false miss" if decision["false_miss"] else "miss"
        style = GREEN if decision["hit"] else RED if decision["false_miss"] else YELLOW
        outcome = decision["outcome"] or "runs"
        line = [
            StyledText(f"{clock(decision['at']):<10}{_short(decision['function'], 25):<26}"),
            StyledText(f"{_short(decision['gpu'], 21):<22}"),
            StyledText(f"{result:<12}", style),
            StyledText(f"{seconds(decision['waited_s']):>10}{seconds(decision['load_s']):>10}"),
            StyledText(f"{seconds(decision['run_s']):>10}"),
            StyledText(f"  {plain(outcome):<11}", "" if outcome in {"completed", "runs"} else RED),
            StyledText(plain(decision["rule"]), DIM),
        ]
        yield ListRow(decision["request"], line)


def _decision(state: State, key: str) -> list[StyledLine]:
    """The decision's known facts; its explanation is requested separately."""
    decision = _item(state["decisions"], "request", key)
    shown = [StyledText(plain(key), BOLD)]
    if decision is not None:
        where = f"  {plain(decision['function'])} on {plain(decision['gpu'])}"
        shown.append(StyledText(where))
    return [shown]


_LETTERS_HEAD = f"{'ID':>6}  {'DIED':<10}{'FUNCTION':<34}{'TRIES':>6}  WHY"


def _letters(state: State, _width: int) -> Iterator[ListRow]:
    for letter in state["dead_letters"]["items"]:
        text = (
            f"{letter['id']:>6}  {clock(letter['at']):<10}{_short(letter['function'], 33):<34}"
            f"{letter['tries']:>6}  {plain(letter['why'])}"
        )
        yield ListRow(str(letter["id"]), [StyledText(text)])


def _letter(state: State, key: str) -> list[StyledLine]:
    letters = state["dead_letters"]["items"]
    return _facts(next((each for each in letters if str(each["id"]) == key), {"id": key}), 10)


def _alerts(state: State, _width: int) -> Iterator[ListRow]:
    for number, alert in enumerate(state["alerts"]):
        style = RED if alert["level"] == "critical" else YELLOW
        line = [
            StyledText(f"{plain(alert['level']):<10}", style),
            StyledText(plain(alert["text"])),
            StyledText(f"  {plain(alert['what_to_do'])}", DIM),
        ]
        yield ListRow(str(number), line)


def _alert(state: State, key: str) -> list[StyledLine]:
    number = int(key)
    for alert in state["alerts"][number : number + 1]:
        return [[StyledText(plain(alert["text"]), BOLD)], [StyledText(plain(alert["what_to_do"]))]]
    return [[StyledText("nothing is wrong any more", GREEN)]]


def _facts(item: Item, width: int) -> list[StyledLine]:
    return [
        [StyledText(f"{name:<{width}}"), StyledText(plain(value))] for name, value in item.items()
    ]


def _item(items: Sequence[Item], name: str, key: str) -> Item | None:
    return next((item for item in items if item[name] == key), None)


def _short(text: object, width: int) -> str:
    """The end of a long text, which is its most specific part."""
    shown = plain(text)
    return shown if len(shown) <= width else "…" + shown[len(shown) - width + 1 :]


PANELS: Sequence[ListPanel] = (
    ListPanel(
        "GPUs", lambda state: len(state["gpus"]), _gpus_head, _gpus, _gpu,
        "no GPU is attached: gpufaas gpu-manager --scheduler URL",
    ),
    ListPanel(
        "functions", lambda state: len(state["functions"]),
        lambda _: _FUNCTIONS_HEAD, _functions, _function,
        "nothing is deployed: faas-cli deploy, or gpufaas up --examples",
    ),
    ListPanel(
        "queue", lambda state: state["queue"]["length"],
        lambda _: _QUEUE_HEAD, _queue, _queued,
        "nobody waits",
    ),
    ListPanel(
        "decisions", lambda state: len(state["decisions"]),
        lambda _: _DECISIONS_HEAD, _decisions, _decision,
        "nothing was decided yet: call a function that uses a GPU",
    ),
    ListPanel(
        "dead letters", lambda state: state["dead_letters"]["count"],
        lambda _: _LETTERS_HEAD, _letters, _letter,
        "no async call has failed for good",
    ),
    ListPanel(
        "alerts", lambda state: len(state["alerts"]),
        lambda _: "", _alerts, _alert,
        "nothing needs looking at",
    ),
)  # fmt: skip
