"""Spans on their way to a collector, and their fate when the collector refuses them."""

import asyncio
import logging
import time
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.telemetry.traces import Span, SpanKind
from gpufaas.errors import CommandError
from gpufaas.options.configuration import TraceSettings, read_settings
from gpufaas.trace_export import ExportSettings, SpanExporter, export_settings
from tests.kit.fakes.trace_collector import Collector, a_collector
from tests.kit.waiting import PATIENCE_S, eventually

pytestmark = pytest.mark.timeout(180, func_only=True)

TRACE = 32 * "a"
URL = "http://collector:4318"


def a_span(number: int = 1, **more: Any) -> Span:
    facts = {"text": "x", "count": 7, "time_s": 0.5, "yes": True}
    usual: dict[str, Any] = {"service": "gpufaas-gateway", "kind": SpanKind.SERVER}
    usual["attributes"] = facts
    return Span(
        TRACE, f"{number:016x}", "", "call f", begin_ns=10**18, end_ns=10**18 + 5, **usual | more
    )


def settings(collector: Collector, **more: Any) -> ExportSettings:
    """Sends at once, and waits for a slow machine."""
    usual: dict[str, Any] = {"every_s": 0.02, "first_pause_s": 0.01, "headers": {"X-Key": "secret"}}
    usual |= {"timeout_s": PATIENCE_S, "closing_s": PATIENCE_S}
    return ExportSettings(f"{collector.url}/v1/traces", **usual | more)


async def test_spans_arrive_as_they_were_noted() -> None:
    async with a_collector() as collector, SpanExporter(settings(collector)) as sink:
        sink.add(lambda: [a_span(1), a_span(2, service="gpufaas-worker", error="it broke")])
        await eventually(lambda: sink.counts()["sent"] == 2)
        first, second = collector.spans
        assert (first.name, first.service, first.error) == ("call f", "gpufaas-gateway", "")
        assert (second.service, second.error) == ("gpufaas-worker", "it broke")
        assert first.attributes == {"text": "x", "count": 7, "time_s": 0.5, "yes": True}
        assert (first.begin_ns, first.end_ns) == (10**18, 10**18 + 5)
        assert collector.headers[0]["X-Key"] == "secret"
        assert sink.counts() == {"sent": 2, "failed": 0, "dropped": 0}


async def test_many_are_sent_in_batches_without_waiting_for_the_time() -> None:
    async with (
        a_collector() as collector,
        SpanExporter(settings(collector, every_s=60.0, batch_parts=10)) as sink,
    ):
        for number in range(1, 31):
            sink.add(lambda number=number: [a_span(number)])  # type: ignore[misc] # bound here
        await eventually(lambda: len(collector.spans) == 30)
        assert len(collector.headers) == 3


@pytest.mark.parametrize("statuses", [[503], [429, 502, 504]])
async def test_batch_is_sent_again_when_the_collector_is_busy(statuses: list[int]) -> None:
    async with a_collector() as collector, SpanExporter(settings(collector)) as sink:
        collector.answers = list(statuses)
        sink.add(lambda: [a_span()])
        await eventually(lambda: sink.counts()["sent"] == 1)
        assert len(collector.spans) == 1
        assert sink.counts()["failed"] == 0


async def test_batch_is_dropped_and_counted_when_it_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with a_collector() as collector, SpanExporter(settings(collector)) as sink:
        collector.answers = [400]
        with caplog.at_level(logging.WARNING):
            sink.add(lambda: [a_span(1), a_span(2)])
            await eventually(lambda: sink.counts()["failed"] == 2)
        sink.add(lambda: [a_span(3)])
        await eventually(lambda: len(collector.spans) == 1)
        assert "traces are dropped: " in caplog.text
        assert "answers 400" in caplog.text


async def test_no_call_waits_when_the_collector_hangs() -> None:
    async with a_collector() as collector:
        collector.open.clear()
        before_s = time.monotonic()
        patient = settings(collector, most_parts=5, closing_s=0.3)
        async with SpanExporter(patient) as sink:
            for number in range(1, 21):
                sink.add(lambda number=number: [a_span(number)])  # type: ignore[misc] # bound here
                await asyncio.sleep(0)
            assert sink.counts()["dropped"] >= 10
            await eventually(lambda: not sink.counts()["sent"])
        assert time.monotonic() - before_s < 20.0
        assert sink.counts()["sent"] == 0
        assert sink.counts()["dropped"] + sink.counts()["failed"] == 20


async def test_what_waits_is_sent_at_the_end() -> None:
    async with a_collector() as collector:
        async with SpanExporter(settings(collector, every_s=60.0)) as sink:
            sink.add(lambda: [a_span()])
        assert len(collector.spans) == 1


async def test_end_comes_in_time_when_there_is_no_collector() -> None:
    before_s = time.monotonic()
    nowhere = "http://127.0.0.1:1/v1/traces"
    async with SpanExporter(ExportSettings(nowhere, closing_s=0.3, first_pause_s=60.0)) as sink:
        sink.add(lambda: [a_span()])
    assert time.monotonic() - before_s < 20.0
    assert sink.counts()["failed"] + sink.counts()["dropped"] == 1


async def test_fault_of_ours_is_reported_and_costs_no_call(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken() -> list[Span]:
        raise ZeroDivisionError

    async with a_collector() as collector, SpanExporter(settings(collector)) as sink:
        sink.add(broken)
        await eventually(lambda: "traces are not sent any more" in caplog.text)
        sink.add(lambda: [a_span()])


# -- where they go --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("endpoint", "environment", "url"),
    [
        ("", {}, None),
        (URL, {}, f"{URL}/v1/traces"),
        (f"{URL}/", {}, f"{URL}/v1/traces"),
        (f"{URL}/v1/traces", {}, f"{URL}/v1/traces"),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": f"{URL}/some"}, f"{URL}/some/v1/traces"),
        ("", {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{URL}/exact"}, f"{URL}/exact"),
        (URL, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://other"}, f"{URL}/v1/traces"),
        (URL, {"OTEL_SDK_DISABLED": "true"}, None),
    ],
)
def test_endpoint_is_ours_or_opentelemetrys(
    endpoint: str, environment: Mapping[str, str], url: str | None
) -> None:
    found = export_settings(TraceSettings(endpoint=endpoint), environment)
    assert (None if found is None else found.url) == url


def test_headers_are_of_the_environment_and_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "headers"
    file.write_text("X-Key: from the file\n\n")
    reported = {"OTEL_EXPORTER_OTLP_HEADERS": "X-Key=old,X-Other=a%20b"}
    found = export_settings(TraceSettings(endpoint=URL, headers_file=str(file)), reported)
    assert found is not None
    assert found.headers == {"X-Key": "from the file", "X-Other": "a b"}


@pytest.mark.parametrize(
    ("tracing", "environment"),
    [
        (TraceSettings(endpoint="collector:4317"), {}),
        (TraceSettings(endpoint=URL), {"OTEL_EXPORTER_OTLP_HEADERS": "nonsense"}),
        (TraceSettings(endpoint=URL, headers_file="/nowhere/at/all"), {}),
    ],
)
def test_what_cannot_be_is_refused(tracing: TraceSettings, environment: Mapping[str, str]) -> None:
    with pytest.raises(CommandError):
        export_settings(tracing, environment)


def test_login_in_a_url_is_a_header_and_is_not_shown() -> None:
    found = export_settings(TraceSettings(endpoint="https://id:s%40cret@host:4318"), {})
    assert found is not None
    assert found.url == "https://host:4318/v1/traces"
    assert found.headers == {"Authorization": "Basic " + b64encode(b"id:s@cret").decode()}


def test_header_goes_before_the_login_in_a_url() -> None:
    reported = {"OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer%20x"}
    found = export_settings(TraceSettings(endpoint="https://id:secret@host"), reported)
    assert found is not None
    assert found.headers == {"authorization": "Bearer x"}


@pytest.mark.parametrize(
    "url",
    [
        "ftp://id:secret@host",
        "id:secret@host:4318",
        "https://id:sec/ret@host",
        "https://id:secret@",
        "https://id:secret@[::1",
        "https://id:secret@host:99999",
    ],
)
def test_login_is_not_shown_when_the_url_is_refused(url: str) -> None:
    for tracing, environment in (
        (TraceSettings(endpoint=url), {}),
        (TraceSettings(), {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": url}),
    ):
        with pytest.raises(CommandError, match="no http") as caught:
            export_settings(tracing, environment)
        assert "ret" not in str(caught.value)
        assert "..." in str(caught.value)


async def test_login_is_sent_and_is_in_no_line_about_a_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with a_collector() as collector:
        named = collector.url.replace("://", "://id:secret@")
        found = export_settings(TraceSettings(endpoint=named), {})
        assert found is not None
        async with SpanExporter(replace(found, closing_s=PATIENCE_S)) as sink:
            collector.answers = [400]
            sink.add(lambda: [a_span()])
        assert collector.headers[0]["Authorization"].startswith("Basic ")
    assert f"{collector.url}/v1/traces answers 400" in caplog.text
    assert "secret" not in caplog.text


def test_settings_of_traces_and_log_lines_are_read() -> None:
    reported = {"GPUFAAS_LOG_FORMAT": "json", "GPUFAAS_TRACING_RATIO": "0.1"}
    found = read_settings(None, reported, {})
    assert (found.log_format, found.tracing.ratio) == ("json", 0.1)
    for wrong in ({"GPUFAAS_LOG_FORMAT": "xml"}, {"GPUFAAS_TRACING_RATIO": "2"}):
        with pytest.raises(CommandError):
            read_settings(None, wrong, {})
