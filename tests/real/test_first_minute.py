"""README's first command: everything starts, the examples answer, nothing stays behind."""

from collections.abc import Mapping

import pytest

from tests.kit.places import ROOT
from tests.kit.stacks.stack import stack
from tests.kit.waiting import wait_until

pytestmark = pytest.mark.group("real", seconds=60)

OF_CHECKOUT = ("functions", "stack.yml", "workflow.yml")
EXAMPLES = ("classify", "generate", "pipeline", "hello")


def test_all_examples_answer_and_nothing_is_left(environment: Mapping[str, str]) -> None:
    with stack(environment) as own:
        for name in OF_CHECKOUT:
            (own.work / name).symlink_to(ROOT / name)
        process = own.launch("--examples", "--once")
        assert process.wait() == 0, own.said()
        said = own.output.read_text()
        for name in EXAMPLES:
            assert f"{name}, first: " in said
        wait_until(lambda: not own.left(), "nothing is left", instead=lambda: str(own.left()))
