"""An explanation in words and columns."""

from scheduler.model import Candidate, Explanation

_MOST_CANDIDATES = 16


def explained(why: Explanation) -> str:
    """Why one request went where it went, for a person to read."""
    lines = [
        f"{why.request} -> {why.chosen}  ({why.policy}, at {why.decided_s:.2f} s)",
        f"  rule: {why.rule}",
        f"  waited {why.waited_s:.2f} s, passed over {why.visits} times; "
        f"{why.ahead} of {why.queue_length} waiting were ahead of it",
    ]
    if why.victims:
        lines.append(f"  evicted for it: {', '.join(why.victims)}")
    lines.append(
        f"  {'candidate':<12}{'state':<7}{'model':<9}{'given':>6}"
        f"{'wait s':>9}{'load s':>9}{'run s':>8}{'done in s':>11}"
    )
    lines += [_row(candidate, why) for candidate in why.candidates[:_MOST_CANDIDATES]]
    left_out = len(why.candidates) - _MOST_CANDIDATES
    if left_out > 0:
        lines.append(f"  and {left_out} later ones")
    return "\n".join(lines)


def _row(candidate: Candidate, why: Explanation) -> str:
    return (
        f"  {candidate.slot:<12}"
        f"{'idle' if candidate.idle else 'busy':<7}"
        f"{'cached' if candidate.cached else '-':<9}"
        f"{candidate.frequency:>6}{candidate.wait_s:>9.2f}{candidate.load_s:>9.2f}"
        f"{candidate.run_s:>8.2f}{candidate.finish_s:>11.2f}"
        f"{'  <- chosen' if candidate.slot == why.chosen else ''}"
    )
