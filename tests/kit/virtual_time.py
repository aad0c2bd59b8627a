"""An event loop on virtual time: when no callback is ready, time jumps to the next timer."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Executor, Future
from functools import wraps
from selectors import DefaultSelector, SelectorKey
from typing import Any, ParamSpec, TypeVar, TypeVarTuple

_Result = TypeVar("_Result")
_Parameters = ParamSpec("_Parameters")
_Arguments = TypeVarTuple("_Arguments")


# No test plays longer; something that repeats for ever while somebody waits in vain does.
_LATEST_S = 3600.0


class Stuck(Exception):
    """Every task waits, and no timer is set, or only timers fired for an hour of virtual time."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Sleeping takes no real time; waiting for what never happens raises Stuck.

    `unhandled` holds what went wrong in callbacks, which an event loop only logs.
    """

    def __init__(self) -> None:
        self.passed_s = 0.0
        self.unhandled: list[dict[str, Any]] = []
        super().__init__(_Jump(self))
        self.set_exception_handler(lambda _, context: self.unhandled.append(context))

    def time(self) -> float:
        return self.passed_s

    def run_in_executor(
        self,
        _executor: Executor | None,
        func: Callable[[*_Arguments], _Result],
        *args: *_Arguments,
    ) -> asyncio.Future[_Result]:
        """Do the work here and now: while a thread did it, virtual time would pass by chance."""
        done: asyncio.Future[_Result] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - an executor hands on whatever it is
            done.set_exception(error)
        return done


class InlineExecutor(Executor):
    """Does work here and now, as a virtual loop's own executor does."""

    def submit(
        self,
        func: Callable[_Parameters, _Result],
        /,
        *args: _Parameters.args,
        **kwargs: _Parameters.kwargs,
    ) -> Future[_Result]:
        done: Future[_Result] = Future()
        try:
            done.set_result(func(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001 - an executor hands on whatever it is
            done.set_exception(error)
        return done


class _Jump(DefaultSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[SelectorKey, int]]:
        if timeout is None or self._loop.passed_s > _LATEST_S:
            raise Stuck
        self._loop.passed_s += timeout
        return super().select(0)


def virtually(
    test: Callable[_Parameters, Coroutine[Any, Any, None]],
) -> Callable[_Parameters, None]:
    """Run a test that is a coroutine on virtual time, from 0 on."""

    @wraps(test)
    def run(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(test(*args, **kwargs))
            loop = runner.get_loop()
            assert isinstance(loop, VirtualLoop)
            assert loop.unhandled == []

    return run


async def until(at_s: float) -> None:
    """Let time pass until then, and all that is due by then happen."""
    loop = asyncio.get_running_loop()
    await asyncio.sleep(max(0.0, at_s - loop.time()))
    for _ in range(10):  # callbacks of this moment, and what follows from them
        await asyncio.sleep(0)


async def outcome(waiting: Awaitable[_Result]) -> _Result | BaseException:
    """What came of it: its result, or the error that it raised."""
    (answer,) = await asyncio.gather(waiting, return_exceptions=True)
    return answer
