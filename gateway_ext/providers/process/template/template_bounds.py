"""How much memory templates may take, and for how long they wait for a function that is idle."""

import time
from collections.abc import Collection
from typing import NamedTuple

from gateway_ext.providers.process.template.function_template import FunctionTemplate


class BoundedTemplate(NamedTuple):
    """A template that is alive, and whether its version has instances."""

    template: FunctionTemplate
    has_instances: bool


def enforce_bounds(
    templates: Collection[BoundedTemplate], *, most_bytes: int, idle_s: float
) -> None:
    """End templates that wait for too long; then the least recently used while all take too much.

    The next instance of such a function is started anew.
    """
    now_s = time.monotonic()
    for template, has_instances in templates:
        if has_instances:
            template.used_s = now_s
        elif now_s - template.used_s > idle_s and not template.busy:
            template.give_up(f"its function was idle for {idle_s:g} s")
    living = [one for one in templates if one.template.alive and not one.template.busy]
    used_bytes = sum(one.template.memory_bytes for one in living)
    for template, _ in sorted(living, key=lambda one: (one.has_instances, one.template.used_s)):
        if used_bytes <= most_bytes:
            return
        used_bytes -= template.memory_bytes
        template.give_up(f"all templates took more than {most_bytes >> 20} MiB of memory")
