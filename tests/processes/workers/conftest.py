"""Runtimes of a test's own process have fork servers that are forked, with torch."""

from tests.kit.programs.torch_forks import quick_fork_servers

__all__ = ["quick_fork_servers"]
