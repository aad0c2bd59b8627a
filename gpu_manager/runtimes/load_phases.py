"""The phases of one load, which overlap where they need not wait for each other."""

from collections.abc import Callable, Iterable, Sequence

from gpu_manager.runtimes.runtime import LoadSpan

# What a load waits for before it begins; the others take place side by side.
_WAITS = ("room", "weights")


class LoadPhases:
    """When each phase of a load began and ended."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._before_s = now_s()
        self._spans: list[LoadSpan] = []
        self._other_s = 0.0

    @property
    def spans(self) -> tuple[LoadSpan, ...]:
        """The phases so far, in the order of their beginnings."""
        return tuple(sorted(self._spans, key=lambda span: (span.begin_s, span.end_s)))

    def end(self, phase: str) -> None:
        """End this phase, and begin the next."""
        before_s, self._before_s = self._before_s, self._now_s()
        self._spans.append(LoadSpan(phase, before_s, self._before_s))

    def add(self, spans: Iterable[LoadSpan]) -> None:
        """Add what others have measured since the last phase ended; what was before is cut off."""
        begin_s = self._before_s
        self._spans += [
            LoadSpan(phase, max(begin_s, first_s), last_s)
            for phase, first_s, last_s in spans
            if last_s > begin_s
        ]

    def finish(self) -> None:
        """The load is over: the time that no phase covers is the phase `other`."""
        beside = [span for span in self._spans if span.phase not in _WAITS]
        self._other_s = max(0.0, self._now_s() - self._before_s - _covered_s(beside))

    def took_s(self) -> dict[str, float]:
        """Return the duration of each phase."""
        found = {"other": self._other_s} if self._other_s else {}
        for span in self._spans:
            found[span.phase] = found.get(span.phase, 0.0) + span.end_s - span.begin_s
        return found

    def __str__(self) -> str:
        begin_s = min((span.begin_s for span in self._spans), default=0.0)
        return ", ".join(
            f"{phase} {first_s - begin_s:.3f}-{last_s - begin_s:.3f}"
            for phase, first_s, last_s in self.spans
        )


def hidden_s(spans: Sequence[LoadSpan]) -> float:
    """Return by how much a load of these phases would be longer if they took place in sequence.

    A transfer counts from the end of reading only: what it did before, it did between waits for
    what is read. So this is a lower bound.
    """
    read_s = max((span.end_s for span in spans if span.phase == "read"), default=float("-inf"))
    beside = [_without_waiting(span, read_s) for span in spans if span.phase not in _WAITS]
    whole_s = sum(span.end_s - span.begin_s for span in beside)
    return whole_s - _covered_s(beside)


def _without_waiting(span: LoadSpan, read_s: float) -> LoadSpan:
    if span.phase != "transfer" or read_s < span.begin_s:
        return span
    return span._replace(begin_s=min(read_s, span.end_s))


def _covered_s(spans: Iterable[LoadSpan]) -> float:
    """Return the time in which at least one of the spans was under way."""
    covered_s, end_s = 0.0, float("-inf")
    for span in sorted(spans, key=lambda found: found.begin_s):
        covered_s += max(0.0, span.end_s - max(end_s, span.begin_s))
        end_s = max(end_s, span.end_s)
    return covered_s
