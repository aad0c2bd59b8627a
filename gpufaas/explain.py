"""`gpufaas explain`: why a request went where it went, and what came of it."""

import argparse
import json
from typing import Any

from gpufaas.arguments import Commands
from gpufaas.explained import explained
from gpufaas.remote import Remote, add_scheduler_options, in_path, remote
from scheduler.model import Candidate, Explanation

# The gateway asks for a GPU under its call's id, this, and a number of its own.
_OF_CALL = "~"


def add_parser(commands: Commands) -> None:
    """Describe the command's options."""
    parser = commands.add_parser("explain", help="why a request went where it went")
    parser.add_argument("request", nargs="?", help="its id; without one, the latest ids")
    add_scheduler_options(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    asked = remote(options)
    if options.request is None:
        found = asked.get("/explain")
        print(json.dumps(found) if options.json else "\n".join(found))
        return 0
    found = story(asked, options.request)
    print(json.dumps(found, indent=1) if options.json else in_words(found))
    return 0


def story(asked: Remote, request: str) -> dict[str, Any]:
    """A request's story, by its id or by that of the gateway's call that it was made for."""
    ids: list[str] = asked.get("/explain")
    of_call = (known for known in ids if known.partition(_OF_CALL)[0] == request)
    found: dict[str, Any] = asked.get(f"/explain/{in_path(next(of_call, request))}")
    return found


def in_words(request: dict[str, Any]) -> str:
    """A request's whole story."""
    lines = [
        f"{request['request']}  function {request['function']}, "
        f"models {', '.join(request['models'])}, {request['arrived_ago_s']:.1f} s ago",
        _ended(request),
    ]
    for decision in request["decisions"]:
        lines += ["", *_decision(decision)]
    return "\n".join(lines)


def _ended(request: dict[str, Any]) -> str:
    waited_s, total_s = request["waited_s"], request["total_s"]
    waited = "no lease so far" if waited_s is None else f"first lease after {waited_s:.3f} s"
    if request["outcome"] is None:
        return f"  not ended yet; {waited}"
    reason = f" ({request['reason']})" if request["reason"] else ""
    return f"  {request['outcome']}{reason} after {total_s:.3f} s; {waited}"


def _decision(decision: dict[str, Any]) -> list[str]:
    where = f"{decision['what']}, {decision['slot']}, after {decision['after_s']:.3f} s"
    lines = [f"{where}: {decision['rule']}"]
    if decision["why"] is not None:
        lines.append(explained(_explanation(decision["why"])))
    came = decision["came"]
    if came is not None:
        lines += _came(decision, came)
    return lines


def _came(decision: dict[str, Any], came: dict[str, Any]) -> list[str]:
    """Estimates beside what was measured."""
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


def _explanation(why: dict[str, Any]) -> Explanation:
    candidates = tuple(Candidate(**candidate) for candidate in why["candidates"])
    rest = {name: value for name, value in why.items() if name not in {"candidates", "victims"}}
    return Explanation(**rest, candidates=candidates, victims=tuple(why["victims"]))
