"""Collections of garbage that threads share: one serves all that wait for it to begin."""

import gc
import threading


class SharedCollection:
    """A collection takes as long as all models of the process have objects.

    So a hundred models that left at once, each with a collection of its own, took seconds.
    """

    def __init__(self) -> None:
        self._running = threading.Lock()
        self._begun = 0

    def collect(self) -> None:
        """Return once all that was garbage before this call has been collected."""
        wanted = self._begun + 1  # the one under way may have passed by some of it
        with self._running:
            if self._begun < wanted:
                self._begun += 1
                gc.collect()
