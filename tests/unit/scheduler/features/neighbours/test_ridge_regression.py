"""The online regression against the closed form over the same window."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.features.neighbours import RidgeRegression, Row

RIDGE = 1e-3
inputs = st.floats(-1.0, 1.0)
observations = st.lists(
    st.tuples(st.tuples(inputs, inputs, inputs), inputs), min_size=3, max_size=60
)


def closed_form(seen: list[tuple[Row, float]]) -> np.ndarray:
    rows, values = np.array([row for row, _ in seen]), np.array([value for _, value in seen])
    return np.linalg.solve(rows.T @ rows + RIDGE * np.eye(rows.shape[1]), rows.T @ values)


@given(observations, st.integers(2, 20))
def test_weights_are_those_of_the_closed_form_over_the_window(
    seen: list[tuple[Row, float]], window: int
) -> None:
    fitted = RidgeRegression(3)
    for place, (row, value) in enumerate(seen):
        fitted.observe(row, value)
        if place >= window:
            fitted.observe(*seen[place - window], -1.0)

    expected = closed_form(seen[-window:])
    assert np.allclose(fitted.weights, expected, atol=1e-5)
    assert fitted.predict((1.0, 0.5, 0.0)) == pytest.approx(expected @ (1.0, 0.5, 0.0), abs=1e-5)


@given(observations)
def test_left_out_errors_are_those_of_fits_without_each(seen: list[tuple[Row, float]]) -> None:
    fitted = RidgeRegression(3)
    for row, value in seen:
        fitted.observe(row, value)

    expected = [
        value - closed_form(seen[:place] + seen[place + 1 :]) @ row
        for place, (row, value) in enumerate(seen)
    ]
    found = [fitted.left_out_error(row, value) for row, value in seen]
    assert np.allclose(found, expected, atol=1e-4)
