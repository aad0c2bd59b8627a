"""Dynamo's settings for the shim's own traces: they hold in whichever thread a trace is made.

Dynamo keeps its settings in context variables (torch 2.10 and 2.11: in globals), so a setting made
once by one thread does not reach the others. The settings are applied around each trace instead,
and to traces for the shim's backends only: what users set for their own `torch.compile` stays.
"""

import contextlib
import functools
import random
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from types import CodeType
from typing import Any, NoReturn, TypeAlias, TypeVar

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._dynamo import config, convert_frame
from torch._dynamo.eval_frame import OptimizeContext, TorchPatcher, skip_code
from torch._dynamo.exc import (
    ResumePrologueTracingError,
    UncapturedHigherOrderOpError,
    unimplemented,
)
from torch.distributions import Distribution

from torch_shim.capture.traces.snapshots import TraceReads
from torch_shim.patching import assigned, redirect, replace

# A module may be called in many ways: at torch's limit of 8 it would run locally from then on.
RECOMPILE_LIMIT = 64
ALL_RECOMPILES_LIMIT = 4096

_OURS = "_gpufaas_backend"
_USERS = "_gpufaas_users_backend"

Backend = TypeVar("Backend", bound=Callable[..., Any])


class _Traces(threading.local):
    """What this thread traces."""

    ours = False  # for one of the shim's backends
    in_background = False  # beside its caller's thread
    reads: TraceReads | None = None  # what the trace has read
    # What its call of what Dynamo compiled could not trace; None where Dynamo has to raise.
    failed: list[CodeType] | None = None


traces = _Traces()


def for_gpu(backend: Backend) -> Backend:
    """Mark a backend as the shim's: its traces use the shim's settings."""
    setattr(backend, _OURS, True)
    return backend


def of_user(backend: Backend) -> Backend:
    """Mark a backend as a user's: it sees every graph that it would see on CUDA."""
    setattr(backend, _USERS, True)
    return backend


def in_users_region() -> bool:
    """Whether this thread runs code that a user compiles with a backend of their own."""
    return _is_marked(get_eval_frame_callback(), _USERS)


def end_graph(kind: str, context: str, why: str, remedy: str, **options: Any) -> NoReturn:
    """End the graph that is being traced before what the tracing thread is at."""
    unimplemented(gb_type=kind, context=context, explanation=why, hints=[remedy], **options)


def install() -> None:
    redirect(convert_frame.CatchErrorsWrapper, "__call__", _trace)
    redirect(OptimizeContext, "__init__", _learn_ends_of_calls)


def _trace(native: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    if not _is_marked(self, _OURS):
        with assigned(traces, ours=False):
            return native(self, *args, **kwargs)
    # The lock that Dynamo takes for a trace: in torch 2.10 the settings are global, and two
    # threads that save and restore them in turn would leave the wrong ones behind.
    with convert_frame.compile_lock, assigned(traces, ours=True), config.patch(_settings()):
        return native(self, *args, **kwargs)


def _learn_ends_of_calls(
    native: Callable[..., None], self: OptimizeContext, callback: Any, *args: Any, **kwargs: Any
) -> None:
    """Have failed traces learn how the calls end of what is compiled for a marked backend."""
    native(self, callback, *args, **kwargs)
    if _is_marked(callback, _OURS):
        is_one_graph = bool(kwargs.get("fullgraph"))
        self.enter_exit_hooks.append(partial(begin_call, is_one_graph=is_one_graph))


def _settings() -> dict[str, Any]:
    return {
        "skip_nnmodule_hook_guards": False,  # an added hook must be noticed
        "allow_rnn": True,
        "capture_scalar_outputs": True,  # `int(batch.max()) + 1`: a worker reads such values too
        "capture_dynamic_output_shape_ops": True,  # selections by a mask
        "suppress_errors": True,  # code that cannot be traced runs eagerly and raises its errors
        "fail_on_recompile_limit_hit": False,  # Dynamo forbids it beside suppress_errors
        "recompile_limit": max(config.recompile_limit, RECOMPILE_LIMIT),
        "accumulated_recompile_limit": max(
            config.accumulated_recompile_limit, ALL_RECOMPILES_LIMIT
        ),
    }


def _is_marked(callback: Any, mark: str) -> bool:
    """Whether a backend, inside the wrappers of Dynamo's and of `torch.compile`, has this mark."""
    while callback is not None and not hasattr(callback, mark):
        inner = getattr(callback, "_torchdynamo_orig_backend", None)
        callback = getattr(callback, "compiler_fn", None) if inner is None else inner
    return callback is not None


# Code whose trace failed in a call: Dynamo passes over it from then on only if the call succeeds.
#
# An input that a module refuses makes its trace fail, too, and the next call may be a good one.

_ALWAYS_RAISED = (ResumePrologueTracingError, UncapturedHigherOrderOpError)


def begin_call(*, is_one_graph: bool) -> Callable[[], None]:
    """Begin a call of what Dynamo compiled; return what ends it.

    Only then Dynamo passes over the code whose trace failed, unless the call fails as well. Of
    what has to be one graph the trace itself fails.
    """
    before, handled = traces.failed, sys.exception()
    failed = traces.failed = None if is_one_graph else []

    def end() -> None:
        traces.failed = before
        if sys.exception() is handled:
            for code in failed or ():
                skip_code(code)

    return end


def is_undecided(code: CodeType, error: Exception) -> bool:
    """Whether the call has to show if code can be traced; not if it went on after this code."""
    if traces.failed is None or code in traces.failed or _says_what_follows(error):
        return False
    traces.failed.append(code)
    return True


def _says_what_follows(error: Exception) -> bool:
    """Whether Dynamo raises the error in any case, or learns from it how the code is to run."""
    strategy = getattr(error, "frame_exec_strategy", None)
    applies = getattr(error, "apply_to_code", True)
    return isinstance(error, _ALWAYS_RAISED) or strategy is not None or not applies


# Keeps traces from changing what the program shares: random generators, default dtype, flags.
#
# Dynamo saves the states of the random generators and some settings of the process before a trace
# and restores them afterwards. While a trace runs in one thread the others go on drawing numbers:
# after such a restoration they would draw the same numbers again. Nothing draws in a trace of
# ours, whose operators run over fake tensors, so there is nothing to restore.

Context: TypeAlias = AbstractContextManager[None]


def leave_process_state() -> None:
    """Ignore, inside traces, the functions by which Dynamo restores shared state."""
    redirect(torch.random, "set_rng_state", _restore_unless_for_gpu)
    redirect(torch.cuda, "set_rng_state", _restore_unless_for_gpu)
    # While a trace runs, `torch.compiler.is_compiling()` is true in all threads, and code that asks
    # takes another way there. What is traced is told so by Dynamo itself.
    redirect(torch.compiler, "_compile_session_context", _begin_session)
    # Python's generator is restored around each compiled frame, and code that draws from it is
    # traced by drawing: only where other threads surely draw meanwhile is it left alone.
    for owner, name in (
        (random, "setstate"),
        (torch, "set_default_dtype"),
        (torch, "use_deterministic_algorithms"),
    ):
        redirect(owner, name, _restore_unless_in_background)
    replace(TorchPatcher, "patch", _patch)


def _begin_session(native: Callable[[], Context]) -> Context:
    return contextlib.nullcontext() if traces.ours else native()


def _restore_unless_for_gpu(native: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return None if traces.ours else native(*args, **kwargs)


def _restore_unless_in_background(native: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return None if traces.in_background else native(*args, **kwargs)


def _patch(native: Callable[[], None]) -> Callable[[], None]:
    """Leave distributions checking their arguments, unless the program itself starts Dynamo."""
    program_starts = functools.cache(lambda: Distribution.set_default_validate_args(value=False))

    def patch() -> None:
        before = Distribution._validate_args  # noqa: SLF001 - no public way to ask
        native()
        if traces.ours:
            Distribution.set_default_validate_args(before)
        else:
            program_starts()

    return patch
