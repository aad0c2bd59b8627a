"""Each place in a program that stays in the function is told once, with a remedy."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

import torch_shim
from gateway_ext.runtime.calls import GpuPlacements
from torch_shim.advice import Advice, CodePlace, ToldPlaces, for_local, users_line
from torch_shim.process_report import GraphBreak, ProcessReport

PRINTS = Advice("it prints", "take it out")


def test_place_is_told_once_with_its_line_and_remedy(caplog: pytest.LogCaptureFixture) -> None:
    told = ToldPlaces()
    for _ in range(3):
        told.tell(CodePlace("app.py", 7), "Net runs here", PRINTS)
    told.tell(CodePlace("app.py", 8), "Net runs here", PRINTS)
    assert [record.getMessage() for record in caplog.records] == [
        "app.py:7: Net runs here: it prints (take it out)",
        "app.py:8: Net runs here: it prints (take it out)",
    ]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


def test_nothing_is_told_when_there_is_nothing_to_do(caplog: pytest.LogCaptureFixture) -> None:
    told = ToldPlaces()
    told.tell(CodePlace("app.py", 7), "Net runs here", for_local("its graph is being traced"))
    assert not caplog.records
    assert not told.to_send()


def test_place_is_in_no_folder_of_the_shim(monkeypatch: pytest.MonkeyPatch) -> None:
    assert users_line().file == __file__
    monkeypatch.setattr(torch_shim, "__path__", [*torch_shim.__path__, str(Path(__file__).parent)])
    assert users_line().file != __file__


def test_program_with_many_places_is_told_of_some(caplog: pytest.LogCaptureFixture) -> None:
    told = ToldPlaces()
    for line in range(100):
        told.tell(CodePlace("app.py", line), "Net runs here", PRINTS)
    assert len(caplog.records) == 31
    assert "gpufaas check" in caplog.records[-1].getMessage()


def test_lines_are_sent_a_few_times_and_fit_into_a_header() -> None:
    told = ToldPlaces()
    for line in range(6):
        told.tell(CodePlace("/home/me/app/a|b\n.py", line), "x", Advice("wh\u00e4t" * 200, "do"))
    sent = [told.to_send() for _ in range(8)]
    assert [len(lines) for lines in sent] == [4, 4, 4, 2, 2, 2, 0, 0]
    for text in (text for lines in sent for text in lines):
        assert text.startswith("me/app/a?b?.py:")
        assert len(text) <= 240
        assert text.isprintable()
        assert "|" not in text


def test_runtime_sends_the_lines_with_its_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    told = ToldPlaces()
    monkeypatch.setattr("torch_shim.leases.request_context.told_places", told)
    placements = GpuPlacements(gpu=True)
    assert placements.used() == []
    told.tell(CodePlace("app.py", 7), "Net runs here", PRINTS)
    told.tell(CodePlace("app.py", 8), "Net runs here", PRINTS)
    sent = "app.py:7: it prints; take it out|app.py:8: it prints; take it out"
    assert placements.used() == [("X-Gpu-Local", sent)]


def test_file_is_sent_as_it_was_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend("/home/me/build-1")
    told = ToldPlaces()
    told.tell(CodePlace("/home/me/build-1/function/handler.py", 7), "Net runs here", PRINTS)
    assert told.to_send() == ["function/handler.py:7: it prints; take it out"]


def test_users_line_is_that_of_the_program() -> None:
    place = _calls_something()
    assert place.file == __file__
    assert place.line > 0


def _calls_something() -> CodePlace:
    return users_line()


def test_report_tells_of_graphs_and_breaks_at_their_lines(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch_shim.process_report.told_places", ToldPlaces())
    report = ProcessReport()
    for _ in range(2):
        report.local_call("layout torch.sparse_coo", 3, "Net", CodePlace("app.py", 4))
        report.local_call("Dynamo is being imported", 0, "Net")
        report.graph_break(GraphBreak("app.py", 9, "generic_jump TensorVariable()"))
    assert [record.getMessage() for record in caplog.records if record.levelno > logging.INFO] == [
        "app.py:4: Net runs on the function's own processor: workers take dense tensors only "
        "(call .to_dense() first)",
        "app.py:9: a graph ends here: a branch depends on a tensor's value "
        "(use torch.where, or branch on a shape)",
    ]
    assert report.counts.local_calls == {
        "layout torch.sparse_coo": 2,
        "Dynamo is being imported": 2,
    }


def test_program_without_a_module_is_told_once_that_it_uses_no_gpu(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch_shim.process_report.told_places", ToldPlaces())
    monkeypatch.setattr("torch_shim.process_report.atexit", Exits)
    idle, with_graph, without = ProcessReport(), ProcessReport(), ProcessReport()
    for report in (idle, with_graph, without):
        report.expect_modules()
    with_graph.graph_call(3, 1, 1, [0.0, 0.0, 0.0])
    for report in (with_graph, without):
        report.note_operator()
        for _ in range(5):
            report.note_answer()
    assert not idle.counts.local_calls
    assert not with_graph.counts.local_calls
    assert [*without.counts.local_calls.values()] == [1]
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(told) == 1
    assert "test_told_places.py" in told[0]
    assert "torch.compile" in told[0]


def test_function_that_was_never_called_tells_nothing_at_its_end(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch_shim.process_report.told_places", ToldPlaces())
    ends: list[Callable[[], None]] = []
    monkeypatch.setattr("torch_shim.process_report.atexit.register", ends.append)
    monkeypatch.setattr("torch_shim.leases.request_context.report", report := ProcessReport())
    GpuPlacements(gpu=True)
    report.expect_modules()
    report.note_operator()
    ends[0]()
    assert not caplog.records
    report.note_answer()
    ends[0]()
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [line.partition(":")[0].rpartition("/")[2] for line in told] == ["test_told_places.py"]


def test_place_is_told_below_the_folder_that_its_file_was_imported_from(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend("/state/build-badf/function")
    told = ToldPlaces()
    told.tell(CodePlace("/state/build-badf/function/handler.py", 7), "Net runs here", PRINTS)
    assert caplog.records[0].getMessage().startswith("handler.py:7: Net runs here")


class Exits:
    """Stands for the end of the process, which does not come."""

    @staticmethod
    def register(_: object) -> None:
        """Forget it."""
