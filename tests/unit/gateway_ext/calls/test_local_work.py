"""What functions report about work without a GPU is kept, within bounds."""

from gateway_ext.calls.learned import Learned
from gateway_ext.model import FunctionId
from tests.kit.fakes.fake_function import a_function, says
from tests.kit.worlds.calling import a_deployment, a_gateway


def test_lines_are_kept_once_in_the_order_of_their_reports() -> None:
    work = Learned(FunctionId("n", "f"))
    work.saw_local(b"app.py:3 it prints; take it out|app.py:9 training; train elsewhere")
    kept = work.lines
    work.saw_local(b"app.py:9 training; train elsewhere|")
    assert work.lines is kept
    work.saw_local(b"app.py:12 a loop; write it out")
    assert work.lines == (
        "app.py:3 it prints; take it out",
        "app.py:9 training; train elsewhere",
        "app.py:12 a loop; write it out",
    )


def test_hostile_report_is_bounded_and_printable() -> None:
    work = Learned(FunctionId("n", "f"))
    work.saw_local(b"\x1b[2J\xff<script>|" + b"x" * 10_000)
    for number in range(100):
        work.saw_local(b"line %d" % number)
    assert len(work.lines) == 20
    assert work.lines[0] == "?[2J?<script>"
    assert all(len(line) <= 240 and line.isascii() and line.isprintable() for line in work.lines)


async def test_caller_is_told_that_a_graph_was_traced_and_no_line_of_the_functions_code() -> None:
    told = "tracing: this call ran on the processor|app.py:3 it prints"
    async with a_gateway() as gateway:
        for header, expected in (
            (told, "tracing: this call ran on the processor"),
            ("app.py:3 it prints", None),
        ):
            async with a_function(says(headers=f"X-Gpu-Local: {header}\r\n")) as instance:
                function = gateway.deploy(a_deployment(), instance)
                assert (await gateway.call()).header("x-gpu-local") == expected
                assert function.learned.lines == ("app.py:3 it prints",)
