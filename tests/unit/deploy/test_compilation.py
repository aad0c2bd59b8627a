"""How the core is compiled."""

import pytest

from deploy.compiled.compilation import optimisation


@pytest.mark.parametrize(
    ("flags", "level"),
    [("", "3"), ("-g -Wall", "3"), ("-O0", "0"), ("-O2 -g -O1", "1"), ("-Os", "s")],
)
def test_core_is_optimised_as_much_as_cflags_say(flags: str, level: str) -> None:
    assert optimisation(flags) == level
