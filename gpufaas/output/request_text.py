"""A request's decisions as text: the candidates that a policy compared, and the outcome."""

from typing import Any

import msgspec

from common.foreign_text import printable
from scheduler.model.values import Explanation, SlotCandidate

_MOST_CANDIDATES = 16
_GIB = 1 << 30


def decision_text(why: Explanation) -> str:
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
        f"{'wait s':>9}{_copy_head(why)}{'load s':>9}{'run s':>8}{'done in s':>11}"
    )
    lines += [_row(candidate, why) for candidate in why.candidates[:_MOST_CANDIDATES]]
    left_out = len(why.candidates) - _MOST_CANDIDATES
    if left_out > 0:
        lines.append(f"  and {left_out} later ones")
    return "\n".join([*lines, *_weighed(why)])


def _weighed(why: Explanation) -> list[str]:
    """The terms of the slots that the policy weighed: seconds gained by each, and their sum."""
    weighed = [candidate for candidate in why.candidates if candidate.terms is not None]
    names = list(dict.fromkeys(name for candidate in weighed for name in candidate.terms or ()))
    if not names:
        return []
    widths = {name: max(9, len(name) + 2) for name in names}
    heads = "".join(f"{name:>{width}}" for name, width in widths.items())
    lines = [f"  {'weighed':<12}{'gain s':>9}{heads}"]
    for candidate in weighed:
        terms = candidate.terms or {}
        cells = "".join(f"{terms.get(name, 0.0):>+{width}.2f}" for name, width in widths.items())
        mark = "  <- chosen" if candidate.slot == why.chosen else ""
        lines.append(f"  {candidate.slot:<12}{sum(terms.values()):>+9.2f}{cells}{mark}")
    return lines


def _copy_head(why: Explanation) -> str:
    """A column for the copy engines, where the policy has them load beside runs."""
    return f"{'copy s':>9}" if any(candidate.beside for candidate in why.candidates) else ""


def _row(candidate: SlotCandidate, why: Explanation) -> str:
    copy_wait = f"{candidate.copy_wait_s:>9.2f}" if _copy_head(why) else ""
    return (
        f"  {candidate.slot:<12}"
        f"{'idle' if candidate.idle else 'busy':<7}"
        f"{'cached' if candidate.cached else '-':<9}"
        f"{candidate.frequency:>6}{candidate.wait_s:>9.2f}{copy_wait}{candidate.load_s:>9.2f}"
        f"{candidate.run_s:>8.2f}{candidate.finish_s:>11.2f}"
        f"{'  <- chosen' if candidate.slot == why.chosen else ''}"
    )


def request_text(request: dict[str, Any]) -> str:
    request = printable(request)
    lines = [
        f"{request['request']}  function {request['function']}, "
        f"models {', '.join(request['models'])}, {request['arrived_ago_s']:.1f} s ago",
        _ended(request),
    ]
    if request["used"] is not None:  # billing is there
        lines.append(_used(request["used"]))
    for decision in request["decisions"]:
        lines += ["", *_decision(decision)]
    rests = [f"{rest['model']} is in {rest_text(rest)}" for rest in request["rests"]]
    if rests:
        lines += ["", f"now: {'; '.join(rests)}"]
    return "\n".join(lines)


def rest_text(rest: dict[str, Any]) -> str:
    """A stage, where, and for how long it still lasts: `host of node1 for 12 s`."""
    leaves_in_s = rest["leaves_in_s"]
    left = "" if leaves_in_s is None else f" for {leaves_in_s:.0f} s"
    return f"{rest['stage']} of {rest['place']}{left}"


def configuration_text(configuration: dict[str, Any]) -> str:
    batch, vcpus, slots = (configuration[part] for part in ("batch", "vcpus", "vgpus"))
    return f"configured for a batch of {batch}, with vCPUs: {vcpus}, slots: {slots}"


def _ended(request: dict[str, Any]) -> str:
    waited_s, total_s = request["waited_s"], request["total_s"]
    waited = "no lease so far" if waited_s is None else f"first lease after {waited_s:.3f} s"
    if request["outcome"] is None:
        return f"  not ended yet; {waited}"
    reason = f" ({request['reason']})" if request["reason"] else ""
    return f"  {request['outcome']}{reason} after {total_s:.3f} s; {waited}"


def _used(used: dict[str, Any]) -> str:
    cost = "" if used["cost"] is None else f"; cost {used['cost']:.6f}"
    return f"  used {used['gpu_s']:.3f} s of a GPU, {used['gpu_byte_s'] / _GIB:.3f} GiB s{cost}"


def _decision(decision: dict[str, Any]) -> list[str]:
    slots = ", ".join([decision["slot"], *decision["more_slots"]])
    lines = [f"{decision['what']}, {slots}, after {decision['after_s']:.3f} s: {decision['rule']}"]
    if decision["configuration"] is not None:
        lines.append(f"  {configuration_text(decision['configuration'])}")
    if decision["why"] is not None:
        lines.append(decision_text(msgspec.convert(decision["why"], Explanation)))
    came = decision["came"]
    if came is not None:
        lines += _came(decision, came)
    return lines


def _came(decision: dict[str, Any], came: dict[str, Any]) -> list[str]:
    estimate = decision["estimate"]
    sources = ", ".join(f"{model} from {tier}" for model, tier in came["loaded_from"].items())
    held_s = came["held_s"]
    lines = [
        f"  load {came['load_s']:.3f} s, expected {estimate['load_s']:.3f}"
        f"{f' ({sources})' if sources else ''}",
        f"  runs {came['run_s']:.3f} s in {came['runs']}, expected {estimate['run_s']:.3f}",
        f"  lease {came['lease']}: "
        + ("in force" if held_s is None else f"slot freed after {held_s:.3f} s"),
    ]
    lines += [f"  load of {model} failed: {why}" for model, why in came["failed_loads"].items()]
    return lines
