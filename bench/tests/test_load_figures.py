"""Medians of figures."""

from bench.measure.load_figures import LoadFigures, medians


def test_medians_are_of_each_figure_and_failures_are_summed() -> None:
    runs = [LoadFigures(float(n), n / 8, n / 4, n, 0.5) for n in (3, 1, 2)]

    assert medians(runs) == LoadFigures(2.0, 0.25, 0.5, 6, 0.5)
