"""What every test shares: hypothesis's profiles and the switch that rewrites scenarios."""

import os

import pytest
from hypothesis import HealthCheck, settings

_QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large]

settings.register_profile(
    "ci", max_examples=150, deadline=None, derandomize=True, suppress_health_check=_QUIET
)
settings.register_profile(
    "thorough", max_examples=1500, deadline=None, suppress_health_check=_QUIET
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite",
        action="store_true",
        help="write what the core does now into tests/scenarios/*.txt, for you to review",
    )
