"""Keeps traces from changing what the program shares: random generators, default dtype, flags.

Dynamo saves the states of the random generators and some settings of the process before a trace and
restores them afterwards. While a trace runs in one thread the others go on drawing numbers: after
such a restoration they would draw the same numbers again. Nothing draws in a trace of ours, whose
operators run over fake tensors, so there is nothing to restore.
"""

import contextlib
import functools
import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch
from torch._dynamo.eval_frame import TorchPatcher
from torch.distributions import Distribution

from torch_shim.capture.traces.dynamo_settings import traces_for_gpu, traces_in_background
from torch_shim.patching import replace

Context: TypeAlias = AbstractContextManager[None]


def install() -> None:
    """Ignore, inside traces, the functions by which Dynamo restores shared state."""
    replace(torch.random, "set_rng_state", functools.partial(_ignored_if, traces_for_gpu))
    replace(torch.cuda, "set_rng_state", functools.partial(_ignored_if, traces_for_gpu))
    # While a trace runs, `torch.compiler.is_compiling()` is true in all threads, and code that asks
    # takes another way there. What is traced is told so by Dynamo itself.
    replace(torch.compiler, "_compile_session_context", _quietly)
    # Python's generator is restored around each compiled frame, and code that draws from it is
    # traced by drawing: only where other threads surely draw meanwhile is it left alone.
    for owner, name in (
        (random, "setstate"),
        (torch, "set_default_dtype"),
        (torch, "use_deterministic_algorithms"),
    ):
        replace(owner, name, functools.partial(_ignored_if, traces_in_background))
    replace(TorchPatcher, "patch", _patch)


def _quietly(native: Callable[[], Context]) -> Callable[[], Context]:
    def session() -> Context:
        return contextlib.nullcontext() if traces_for_gpu() else native()

    return session


def _ignored_if(tracing: Callable[[], bool], native: Callable[..., Any]) -> Callable[..., Any]:
    def restore(*args: Any, **kwargs: Any) -> Any:
        return None if tracing() else native(*args, **kwargs)

    return restore


def _patch(native: Callable[[], None]) -> Callable[[], None]:
    """Leave distributions checking their arguments, unless the program itself starts Dynamo."""
    program_starts = functools.cache(lambda: Distribution.set_default_validate_args(value=False))

    def patch() -> None:
        before = Distribution._validate_args  # noqa: SLF001 - no public way to ask
        native()
        if traces_for_gpu():
            Distribution.set_default_validate_args(before)
        else:
            program_starts()

    return patch
