"""What functions report about work without a GPU is kept, within bounds."""

from gateway_ext.calls.local_work import LocalWork


def test_lines_are_kept_once_in_the_order_of_their_reports() -> None:
    work = LocalWork()
    work.saw(b"app.py:3 it prints; take it out|app.py:9 training; train elsewhere")
    kept = work.lines
    work.saw(b"app.py:9 training; train elsewhere|")
    assert work.lines is kept
    work.saw(b"app.py:12 a loop; write it out")
    assert work.lines == (
        "app.py:3 it prints; take it out",
        "app.py:9 training; train elsewhere",
        "app.py:12 a loop; write it out",
    )


def test_hostile_report_is_bounded_and_printable() -> None:
    work = LocalWork()
    work.saw(b"\x1b[2J\xff<script>|" + b"x" * 10_000)
    for number in range(100):
        work.saw(b"line %d" % number)
    assert len(work.lines) == 20
    assert work.lines[0] == "?[2J?<script>"
    assert all(len(line) <= 240 and line.isascii() and line.isprintable() for line in work.lines)
