"""What follows from an attempt: an end, or another one, and when; pure."""

from dataclasses import dataclass, replace

# The function is there and says: later. Everything else is its answer.
RETRIED = frozenset({429, 502, 503, 504})


@dataclass(frozen=True, slots=True)
class BackOff:
    """How long to wait before the next attempt: longer each time, up to a most."""

    first_s: float = 1.0
    factor: float = 2.0
    most_s: float = 60.0
    # Of each wait this share is left to chance, so that what failed together comes apart.
    jitter: float = 0.5

    def wait_s(self, failures: int, chance: float, at_least_s: float = 0.0) -> float:
        """The wait after that many failures; `chance` is from 0 to 1.

        What the other side asked for (`at_least_s`) is kept, also beyond the most.
        """
        steps = min(failures - 1, 64)  # beyond it the power is past any most
        whole_s = min(self.most_s, self.first_s * self.factor**steps)
        spread_s = whole_s * self.jitter
        if at_least_s > whole_s - spread_s:
            return at_least_s + spread_s * chance
        return whole_s - spread_s * (1.0 - chance)


@dataclass(frozen=True, slots=True)
class Tried:
    """How an attempt ended.

    `taken` is False where nothing was tried, because the function has as many calls as it takes.
    """

    status: int
    why: str
    broken: bool = False
    taken: bool = True
    retry_after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Final:
    """This is the result."""


@dataclass(frozen=True, slots=True)
class Later:
    """Try again after this time."""

    wait_s: float
    counts: bool


@dataclass(frozen=True, slots=True)
class GiveUp:
    """It was tried as often, or as long, as it may be."""

    why: str


Verdict = Final | Later | GiveUp


@dataclass(frozen=True, slots=True)
class Patience:
    """How often, and for how long, something is tried."""

    attempts: int = 10
    # A call that is not even taken costs no attempt; it is given up at this age.
    most_age_s: float = 24 * 3600.0
    # A function may ask for a longer pause, up to this.
    most_retry_after_s: float = 3600.0
    back_off: BackOff = BackOff()

    def of(self, attempts: int | None) -> "Patience":
        """The same, with as many attempts as a function wishes for, if it does."""
        return self if attempts is None else replace(self, attempts=max(1, attempts))

    def verdict(
        self, tried: Tried, *, attempts: int, deferrals: int, age_s: float, chance: float
    ) -> Verdict:
        """What follows, where `attempts` and `deferrals` went before this one."""
        if not tried.broken and tried.status not in RETRIED:
            return Final()
        asked_s = min(tried.retry_after_s, self.most_retry_after_s)
        if not tried.taken:
            if age_s >= self.most_age_s:
                return GiveUp(f"not taken for {age_s:.0f} s: {tried.why}")
            return Later(self.back_off.wait_s(deferrals + 1, chance, asked_s), counts=False)
        made = attempts + 1
        if made >= self.attempts:
            return GiveUp(f"{made} attempts failed, the last one with: {tried.why}")
        return Later(self.back_off.wait_s(made, chance, asked_s), counts=True)
