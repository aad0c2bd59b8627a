"""Programs and pages that modules of the gateway find beside themselves, by path."""

from pathlib import Path

import pytest

from gateway_ext.providers.process import launch, python_environments, users
from gateway_ext.runtime import handler_module
from gateway_ext.ui import routes

# Only those who start a program know its path.
PROGRAMS = (
    launch._LAUNCHER,  # noqa: SLF001 - as above
    python_environments._PROGRAM,  # noqa: SLF001 - as above
    users._PROGRAM,  # noqa: SLF001 - as above
    launch.RUNTIME / "__main__.py",
)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.name)
def test_program_is_found_when_it_is_named_by_its_path(program: Path) -> None:
    compile(program.read_text(encoding="utf-8"), str(program), "exec")


def test_page_is_found_when_it_lies_beside_its_routes() -> None:
    assert (routes.STATIC / routes.PAGE).is_file()


def test_runtimes_own_lines_are_known_when_a_trace_is_shown() -> None:
    own = handler_module._RUNTIME  # noqa: SLF001 - no message shows it
    assert own == f"{launch.RUNTIME}/"
