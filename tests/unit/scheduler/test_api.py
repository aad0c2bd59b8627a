"""What other folders may import of the scheduler."""

import subprocess
import sys


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
