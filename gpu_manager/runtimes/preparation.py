"""When a runtime prepares: at the node's start, or for the first program that may use a GPU."""

from gpu_manager.runtimes.runtime import Runtime


class Preparation:
    """Prepares the runtime as soon as there is one and somebody needs it."""

    def __init__(self, *, at_start: bool) -> None:
        self._needed = at_start
        self._runtime: Runtime | None = None

    def start(self, runtime: Runtime) -> None:
        """Prepare this runtime, now or when it is needed."""
        self._runtime = runtime
        if self._needed:
            runtime.prepare()

    def need(self) -> None:
        """Prepare for a program that may use a GPU soon; without effect if that was done."""
        if self._needed:
            return
        self._needed = True
        if self._runtime is not None:
            self._runtime.prepare()
