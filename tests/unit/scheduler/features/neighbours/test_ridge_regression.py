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
    fitted = RidgeRegression(3, window=window)
    for row, value in seen:
        fitted.observe(row, value)

    assert len(fitted) == min(window, len(seen))
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
    assert np.allclose(list(fitted.left_out_errors()), expected, atol=1e-4)
    assert fitted.left_out_mse() == pytest.approx(np.mean(np.square(expected)), abs=1e-4)


def test_nothing_is_said_of_errors_before_two_observations() -> None:
    fitted = RidgeRegression(2)
    assert fitted.left_out_mse() is None
    fitted.observe((1.0, 2.0), 3.0)
    assert fitted.left_out_mse() is None
