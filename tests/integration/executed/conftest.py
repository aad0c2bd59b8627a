"""One `gpufaas exec` for the programs of this folder that need no options of their own."""

from pathlib import Path

import pytest

from tests.kit.folder_fixtures import of_folder
from tests.kit.programs.executed_programs import ForkedPrograms, forked_programs

pytestmark = pytest.mark.group("executed", seconds=500)  # of all modules here


@pytest.fixture(scope="module")
def programs(request: pytest.FixtureRequest) -> ForkedPrograms:
    """What runs them, each in a process of its own."""
    return of_folder(request, Path(__file__).parent, forked_programs)
