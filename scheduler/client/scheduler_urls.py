"""Which of several schedulers is asked next: the one that leads, as far as is known."""

from collections.abc import Container, Sequence


class SchedulerUrls:
    """The configured URLs, and the one to ask (`at`), which a scheduler may have named."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = [url.rstrip("/") for url in urls]
        self.at = self._urls[0]

    def turn_to_another(self, asked: Container[str]) -> bool:
        """Ask one next that was named or configured and not asked yet; False if there is none."""
        if self.at not in asked:
            return True
        left = [url for url in self._urls if url not in asked]
        if left:
            self.at = left[0]
        return bool(left)

    def move(self, failed: str, leader: str | None = None) -> None:
        """Ask the leader that the failed one named next, or else the scheduler after it.

        Several calls may report the same failure: only the first one changes the scheduler.
        """
        if leader not in (None, failed):
            self.at = leader
        elif self.at == failed:
            number = self._urls.index(failed) if failed in self._urls else -1
            self.at = self._urls[(number + 1) % len(self._urls)]
