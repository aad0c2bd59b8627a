"""Reading Azure traces: every way a file can be wrong, and what a window becomes."""

from collections import Counter
from pathlib import Path

import pytest

from scheduler.model.errors import BadWorkload
from scheduler.sim import workload
from scheduler.sim.workload import CARRIED, Pattern, Trace, Window

HEADER = "HashOwner,HashApp,HashFunction,Trigger,1,2\n"
ROWS = Trace(((1, 1), (8, 4), (0, 0), (3, 3)))


def test_parse_reads_a_row_a_function() -> None:
    parsed = workload.parse(HEADER + "o,a,f,http,3,4\n\no,a,g,timer,0,1\n", "t.csv")

    assert parsed.rows == ((3, 4), (0, 1))
    assert parsed.minutes == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "t.csv: row 1: expected the columns HashOwner, HashApp, HashFunction, Trigger"),
        ("a,b,c,d,1\n", "t.csv: row 1: expected the columns"),
        ("HashOwner,HashApp,HashFunction,Trigger\n", "t.csv: row 1: expected the columns"),
        (HEADER, "t.csv: it has no row besides its header"),
        (HEADER + "o,a,f,http,3\n", "t.csv: row 2: it has 1 minutes, the header 2"),
        (HEADER + "o,a,f,http,3,4,5\n", "t.csv: row 2: it has 3 minutes, the header 2"),
        (
            HEADER + "o,a,f,http,3,4\no,a,g,http,3,x\n",
            "t.csv: row 3, minute column 2: 'x' is not a number of invocations",
        ),
        (HEADER + "o,a,f,http,-1,4\n", "t.csv: row 2, minute column 1: '-1' is not a number"),
        (HEADER + "o,a,f,http,1.5,4\n", "t.csv: row 2, minute column 1: '1.5' is not a number"),
        (HEADER + "o,a,f,http,,4\n", "t.csv: row 2, minute column 1: '' is not a number"),
    ],
)
def test_parse_names_the_row_and_why(text: str, message: str) -> None:
    with pytest.raises(BadWorkload) as raised:
        workload.parse(text, "t.csv")

    assert str(raised.value).startswith(message)


def test_read_explains_why_when_there_is_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(BadWorkload, match=r"none\.csv: No such file"):
        workload.read(str(tmp_path / "none.csv"))


def test_read_explains_why_when_the_file_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "binary.csv"
    path.write_bytes(b"\xff\xfe\x00\x81")

    with pytest.raises(BadWorkload, match="not a text file in UTF-8"):
        workload.read(str(path))


def test_read_finds_the_carried_trace() -> None:
    carried = workload.read(CARRIED)

    assert (len(carried.rows), carried.minutes) == (500, 240)


def test_most_used_orders_by_use_in_the_window_and_leaves_out_the_top() -> None:
    assert workload.most_used(ROWS, Window(0, 2, functions=2)) == [(8, 4), (3, 3)]
    assert workload.most_used(ROWS, Window(0, 2, functions=2, without_top=1)) == [(3, 3), (1, 1)]


@pytest.mark.parametrize(("functions", "without_top"), [(0, 0), (4, 0), (3, 1), (1, 9)])
def test_most_used_names_how_many_there_are_when_too_many_are_asked_for(
    functions: int, without_top: int
) -> None:
    with pytest.raises(BadWorkload, match=rf"a working set of {functions} cannot be had"):
        workload.most_used(ROWS, Window(0, 2, functions, without_top))


def test_workload_scales_the_busiest_minute_to_the_rate() -> None:
    made = workload.workload(ROWS, Window(0, 2, functions=3), rate=24, pattern=Pattern(), seed=1)
    by_minute = Counter(at_s // 60 for at_s, _ in made.arrivals)

    assert by_minute == {0: 24, 1: 16}


@pytest.mark.parametrize("window", [Window(-1, 1, 1), Window(0, 0, 1), Window(1, 2, 1)])
def test_workload_refuses_a_window_outside_the_trace(window: Window) -> None:
    with pytest.raises(BadWorkload, match="the trace has minutes 0 to 1"):
        workload.workload(ROWS, window, rate=10, pattern=Pattern(), seed=1)


def test_workload_refuses_a_rate_below_one() -> None:
    with pytest.raises(BadWorkload, match="rate must be at least 1, not 0"):
        workload.workload(ROWS, Window(0, 2, functions=2), rate=0, pattern=Pattern(), seed=1)


def test_most_used_refuses_to_leave_out_fewer_than_none() -> None:
    with pytest.raises(BadWorkload, match="without-top must be 0 or more, not -1"):
        workload.most_used(ROWS, Window(0, 2, functions=2, without_top=-1))
