"""What other folders may import of the scheduler."""

import subprocess
import sys
from inspect import isfunction

from scheduler import api


def test_api_names_everything_that_it_imports_and_nothing_else() -> None:
    public = {name for name in vars(api) if name[0].isupper() and name != "Protocol"}
    functions = {
        name
        for name, value in vars(api).items()
        if isfunction(value) and value.__module__.startswith("scheduler.")
    }
    assert set(api.__all__) == public | functions


def test_api_brings_no_core_and_no_event_loop_when_it_is_imported() -> None:
    """A GPU manager, and later a gateway, needs the words but not the state machine."""
    code = "import sys, scheduler.api; print(*sys.modules)"
    modules = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.split()
    assert "scheduler.model.events" in modules
    assert not {
        "scheduler.core.core",
        "scheduler.core.placer",
        "asyncio",
        "logging",
    } & set(modules)
