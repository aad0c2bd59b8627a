"""Schedulers and managers whose streams no silence ends: a machine that is held up breaks none."""

from dataclasses import replace
from functools import partial

from tests.kit.worlds.cluster_in_process import TIMES, a_scheduler, attached

STEADY = replace(TIMES, silence_s=60.0, greeting_s=60.0, leave_s=60.0)

a_steady_scheduler = partial(a_scheduler, times=STEADY)
steadily_attached = partial(attached, times=STEADY)
