"""The GPU seconds that an owner has used in the last part of time, for quotas."""

from collections import deque

_PARTS = 60


class GpuWindow:
    """GPU seconds used in the last `window_s`, running leases included.

    What was used is kept in parts of a sixtieth of the window, and a part leaves as a whole: so it
    counts never less than what was used in the window, and at most that of one part more.
    """

    __slots__ = ("_part_s", "_parts", "_since_s", "_total_s", "window_s")

    def __init__(self, window_s: float, now: float) -> None:
        self.window_s = window_s
        self._part_s = window_s / _PARTS
        self._parts: deque[tuple[int, float]] = deque()
        self._since_s = now
        self._total_s = 0.0

    def used_s(self, rate: float, now: float) -> float:
        """What was used until now, since the last look at this many slots at a time."""
        self.advance(rate, now)
        return self._total_s

    def seen_s(self, rate: float, now: float) -> float:
        """The same for who only looks: nothing is noted, so a recording replays without it."""
        gone_s = now - self.window_s
        old_s = sum(amount for part, amount in self._parts if (part + 1) * self._part_s <= gone_s)
        lately_s = max(0.0, now - max(self._since_s, gone_s))
        return max(0.0, self._total_s - old_s) + rate * lately_s

    def advance(self, rate: float, now: float) -> None:
        """Count what `rate` slots have used since the last look, and forget what is too old."""
        part_s, parts = self._part_s, self._parts
        begins_s = max(self._since_s, now - self.window_s - part_s)
        while rate > 0.0 and begins_s < now:
            part = int(begins_s / part_s)
            ends_s = min(now, (part + 1) * part_s)
            if ends_s <= begins_s:  # a time that lies on the edge of a part, but for its last digit
                part, ends_s = part + 1, min(now, (part + 2) * part_s)
            self._add(part, rate * (ends_s - begins_s))
            begins_s = ends_s
        self._since_s = max(self._since_s, now)
        while parts and (parts[0][0] + 1) * part_s <= now - self.window_s:
            self._total_s -= parts.popleft()[1]
        if not parts:
            self._total_s = 0.0

    def add(self, amount_s: float, now: float) -> None:
        """Count so much more, that was used lately."""
        self._add(int(now / self._part_s), amount_s)

    def give_back(self, amount_s: float) -> None:
        """So much of what was counted last was not used."""
        parts = self._parts
        while parts and amount_s > 0.0:
            part, used_s = parts.pop()
            less_s = min(used_s, amount_s)
            amount_s -= less_s
            self._total_s -= less_s
            if used_s > less_s:
                parts.append((part, used_s - less_s))

    def frees_in_s(self, short_s: float, now: float) -> float | None:
        """In how many seconds so much will have left, if nothing more is used; None: never."""
        for part, amount_s in self._parts:
            short_s -= amount_s
            if short_s <= 0.0:
                return (part + 1) * self._part_s + self.window_s - now
        return None

    def _add(self, part: int, amount_s: float) -> None:
        parts = self._parts
        if parts and parts[-1][0] >= part:
            parts[-1] = parts[-1][0], parts[-1][1] + amount_s
        else:
            parts.append((part, amount_s))
        self._total_s += amount_s
