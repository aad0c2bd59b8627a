"""Who holds a process's memory: the bytes of all objects, by their type and by what refers to them.

Objects without references of their own (text, numbers, tuples of these) are counted too: the
collector of cycles does not follow them, so they are in none of its lists.
"""

import gc
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from hunt.soak.attribution.heap_watch import type_name

# What says little of whom an object belongs to: its own holder is named as well, so far up.
_CONTAINERS = frozenset({dict, list, tuple, set, frozenset})
_MOST_HOLDERS = 4


def held_bytes() -> "Counter[str]":
    """The bytes of all objects, by type and holders; it stops the process for some seconds.

    Objects of before the start, which are frozen, are let into the collector's lists again.
    """
    gc.unfreeze()
    tracked = gc.get_objects()
    holder_of = _holders(tracked)
    known = {id(each): each for each in tracked if each is not tracked}
    for number, (held, _) in holder_of.items():
        known.setdefault(number, held)
    found: Counter[str] = Counter()
    for each in known.values():
        found[_text(each, holder_of)] += sys.getsizeof(each)
    return found


def _holders(tracked: Sequence[Any]) -> dict[int, tuple[Any, Any]]:
    """Every object that another one refers to, with the first such, by the object's address."""
    found: dict[int, tuple[Any, Any]] = {}
    pending: list[Any] = list(tracked)
    while pending:
        holder = pending.pop()
        for held in gc.get_referents(holder):
            if id(held) not in found:
                found[id(held)] = held, holder
                if not gc.is_tracked(held):
                    pending.append(held)
    return found


def _text(one: Any, holder_of: dict[int, tuple[Any, Any]]) -> str:
    words = [type_name(one)]
    for _ in range(_MOST_HOLDERS):
        _, holder = holder_of.get(id(one), (None, None))
        if holder is None:
            break
        words.append(type_name(holder))
        if type(holder) not in _CONTAINERS:
            break
        one = holder
    return " < ".join(words)
