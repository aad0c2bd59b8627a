"""The process that forks a runtime's workers."""

from gpu_manager.runtimes.process import ProcessRuntime


def server_pid(runtime: ProcessRuntime) -> int | None:
    """Its id; None if it does not run."""
    return runtime._server.pid  # noqa: SLF001 - of no use to the product
