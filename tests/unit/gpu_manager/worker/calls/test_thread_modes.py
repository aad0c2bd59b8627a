"""Whatever a program enters, and however it ends: the next call computes as if none had run."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gpu_manager.call_errors import ContextLost
from gpu_manager.worker.calls.call import Computing, Mode
from gpu_manager.worker.program.allowed_operators import OperatorTable
from tests.kit.worlds.caller import CallFailed, LocalWorker, program, step
from torch_shim.wire.arithmetic import use_arithmetic
from torch_shim.wire.messages import Arithmetic
from torch_shim.wire.programs import Named, Ref

ENTER, EXIT = (
    "t:torch.amp.autocast_mode._enter_autocast",
    "t:torch.amp.autocast_mode._exit_autocast",
)
NEST = "t:torch._functorch.predispatch._vmap_increment_nesting"
UNNEST = "t:torch._functorch.predispatch._vmap_decrement_nesting"
BFLOAT16 = Named("dtype", "bfloat16")
ENTERS = step(ENTER, "cuda", BFLOAT16, True, None)
FAILS = step("m:view", Ref(0), 5)
AUTOCAST: tuple[Any, ...] = ("bfloat16", None, [], None)
PLAIN: tuple[Any, ...] = (None, None, [], None)
CPU = torch.device("cpu")

LEAVING = {
    "fails between": [ENTERS, FAILS, step(EXIT, Ref(1))],
    "never leaves": [ENTERS],
    "enters two and leaves the outer one": [ENTERS, ENTERS, step(EXIT, Ref(1))],
    "leaves the outer one first": [ENTERS, ENTERS, step(EXIT, Ref(1)), step(EXIT, Ref(2))],
    "leaves twice": [ENTERS, step(EXIT, Ref(1)), step(EXIT, Ref(1))],
    "leaves what it never entered": [step(EXIT, Ref(0))],
    "turns it off": [step(ENTER, "cuda", Named("dtype", "float16"), False, False), FAILS],
    "keeps no casts": [step(ENTER, "cuda", BFLOAT16, True, False)],
    "fails in vmap": [step(NEST, 3, "error"), ENTERS, FAILS],
    "stays in vmap": [step(NEST, 3, "error"), step(NEST, 2, "same")],
    "leaves vmap twice": [step(NEST, 3, "error"), step(UNNEST), step(UNNEST)],
}
LOOK = program(
    step("o:matmul", Ref(0), Ref(0)),
    step("t:torch.is_grad_enabled"),
    step("t:torch.ones", [1]),
    output=[Ref(1), Ref(2), Ref(3)],
)


def modes() -> tuple[Any, ...]:
    """What torch keeps for the calling thread."""
    functorch = torch._C._functorch  # noqa: SLF001 - torch has no public way to ask
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return (
        *(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")),
        *(torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda")),
        torch.is_autocast_cache_enabled(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        functorch.get_dynamic_layer_stack_depth(),
        depth,
    )


@pytest.mark.parametrize("options", [PLAIN, AUTOCAST], ids=["plain", "under autocast"])
@pytest.mark.parametrize("leaving", LEAVING)
def test_call_computes_in_float32_when_one_before_left_its_modes(
    leaving: str, options: tuple[Any, ...]
) -> None:
    x = torch.randn(4, 4)
    with LocalWorker().connect() as caller:
        for _ in range(2):
            with suppress(CallFailed):
                caller.call(program(*LEAVING[leaving], output=[1]), x, options=options)
            product, grad, ones = caller.call(LOOK, x).outputs
            assert torch.equal(product, x @ x)
            assert (grad, ones.dtype) == (False, torch.float32)
            half, _, _ = caller.call(LOOK, x, options=AUTOCAST).outputs
            assert half.dtype is torch.bfloat16


class CastsSeen(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch gives it no types
    """Counts the casts of a tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # as above
        self.count = 0
        self._tensor = tensor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.count += func is torch.ops.aten._to_copy.default and args[0] is self._tensor  # noqa: SLF001 - its name
        return func(*args, **(kwargs or {}))


ENTERING: dict[str, list[tuple[Any, ...]]] = {
    "one": [("cuda", torch.bfloat16, True, None)],
    "one that keeps casts": [("cuda", torch.bfloat16, True, True)],
    "none": [],
}


@pytest.mark.parametrize("around", [None, torch.bfloat16], ids=["plain", "under autocast"])
@pytest.mark.parametrize("entering", ENTERING)
def test_no_cast_is_kept_when_a_program_never_leaves_autocast(
    entering: str, around: torch.dtype | None
) -> None:
    """Such casts are the process's: no end of a call, and of no thread, would free them."""
    enter = OperatorTable(CPU).find(ENTER)
    assert enter is not None
    needs_gradients = torch.ones(4, 4, requires_grad=True)
    with CastsSeen(needs_gradients) as casts:
        with Computing(CPU, Mode(around, torch.float32)):
            for options in ENTERING[entering]:
                enter(*options)
            torch.ones(4, 4) @ needs_gradients
        within = casts.count
        with torch.autocast("cpu", torch.bfloat16):
            torch.ones(4, 4) @ needs_gradients
    assert casts.count == within + 1


class Ended(BaseException):
    """What ends a program from outside."""


def _cancelled() -> None:
    torch.autocast("cpu", torch.bfloat16).__enter__()  # type: ignore[no-untyped-call] # torch gives it no types
    torch.set_grad_enabled(True)
    raise Ended


@pytest.mark.parametrize(
    "leave_behind",
    [
        lambda: torch.set_autocast_enabled("cpu", True),
        lambda: torch.set_autocast_enabled("cuda", True),
        lambda: torch.set_autocast_dtype("cpu", torch.float16),
        lambda: torch.set_autocast_dtype("cuda", torch.bfloat16),
        lambda: torch.set_autocast_cache_enabled(False),
        torch.autocast_increment_nesting,
        lambda: [torch.autocast_decrement_nesting() for _ in range(3)],
        lambda: torch.set_grad_enabled(True),
        lambda: torch._C._functorch._vmap_increment_nesting(2, "error"),  # noqa: SLF001 - as above
        _cancelled,
    ],
)
def test_thread_is_as_it_began_when_a_call_leaves_a_mode_behind(
    leave_behind: Callable[[], object],
) -> None:
    mode = Mode(None, torch.float32)
    with torch.set_grad_enabled(False):
        with Computing(CPU, mode):
            before = modes()
        for place in ("behind", "before"):
            with suppress(Ended):
                if place == "before":
                    leave_behind()
                with Computing(CPU, mode):
                    assert modes() == before
                    leave_behind()
            if place == "behind":
                assert modes() == before
        with Computing(CPU, mode):
            assert modes() == before


@pytest.mark.parametrize(
    ("change", "back"),
    [
        (
            lambda: torch.set_default_dtype(torch.float64),
            lambda: torch.set_default_dtype(torch.float32),
        ),
        (lambda: use_arithmetic(Arithmetic("medium")), lambda: use_arithmetic(Arithmetic())),
        (
            lambda: use_arithmetic(Arithmetic(cudnn_tf32=False)),
            lambda: use_arithmetic(Arithmetic()),
        ),
        (lambda: use_arithmetic(Arithmetic(deterministic=2)), lambda: use_arithmetic(Arithmetic())),
        (
            lambda: torch._C._set_deterministic_fill_uninitialized_memory(False),  # noqa: SLF001 - as in the product
            lambda: torch._C._set_deterministic_fill_uninitialized_memory(True),  # noqa: SLF001 - as in the product
        ),
    ],
    ids=["default dtype", "tf32", "cudnn", "deterministic", "fill"],
)
def test_worker_ends_when_the_process_computes_otherwise_than_a_call_asked(
    change: Callable[[], object], back: Callable[[], object]
) -> None:
    """Other calls of the process may be under way: nothing may be set for one alone."""
    change()
    try:
        with pytest.raises(ContextLost), Computing(CPU, Mode(None, torch.float32)):
            pass
    finally:
        back()


def test_worker_ends_when_its_thread_is_in_inference_mode() -> None:
    with (
        torch.inference_mode(),
        pytest.raises(ContextLost),
        Computing(CPU, Mode(None, torch.float32)),
    ):
        pass


def test_call_has_its_settings_when_something_else_changed_those_of_the_process() -> None:
    """Between calls: nobody else may rely on them."""
    x = torch.randn(4, 4)
    with LocalWorker().connect() as caller:
        caller.call(LOOK, x)
        torch.set_default_dtype(torch.float64)
        use_arithmetic(Arithmetic("medium"))
        torch._C._set_deterministic_fill_uninitialized_memory(False)  # noqa: SLF001 - as in the product
        assert caller.call(LOOK, x).outputs[2].dtype is torch.float32


def test_call_is_refused_when_its_program_draws_and_no_generator_came() -> None:
    what = program(step("t:torch.rand_like", Ref(0)), output=[Ref(1)], random=True)
    with LocalWorker().connect() as caller, pytest.raises(CallFailed, match="generator"):
        caller.call(what, torch.ones(4))
