"""Requests as they are written, medians of figures, and the order of calls."""

from bench.gateway.many_models import chosen
from bench.measure.load_figures import LoadFigures, http_post, medians


def test_http_post_is_a_request_that_any_server_reads() -> None:
    assert http_post("/f", "X: y\r\n", b"body") == (
        b"POST /f HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nX: y\r\n"
        b"Content-Length: 4\r\n\r\nbody"
    )


def test_medians_are_of_each_figure_and_failures_are_summed() -> None:
    runs = [LoadFigures(float(n), n / 8, n / 4, n, 0.5) for n in (3, 1, 2)]

    assert medians(runs) == LoadFigures(2.0, 0.25, 0.5, 6, 0.5)


def test_zipf_calls_are_the_same_for_a_seed_and_mostly_of_the_first_models() -> None:
    calls = chosen(1)

    assert len(calls) == 650
    assert calls == chosen(1) != chosen(2)
    assert calls.count(0) > 3 * calls.count(15)
    assert set(calls) <= set(range(16))
