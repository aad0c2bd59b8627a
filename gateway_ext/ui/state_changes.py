"""The differences between two states of the page; pure."""

from collections.abc import Mapping

from gateway_ext.ui.page_state import Json, PageChanges, PageState


def changes(old: PageState, new: PageState) -> PageChanges:
    """The changes that lead from the old state to the new one."""
    found = PageChanges()
    for section, value in new.whole.items():
        before = old.whole.get(section)
        if before is not value and before != value:
            found.whole[section] = value
    for section, items in new.items.items():
        before_items = old.items.get(section, {})
        replaced = _replaced(before_items, items)
        if replaced:
            found.replaced[section] = replaced
        removed = [key for key in before_items if key not in items]
        if removed:
            found.removed[section] = removed
    return found


def _replaced(old: Mapping[str, Json], new: Mapping[str, Json]) -> list[Json]:
    """Items that are new or changed; the same object need not be compared."""
    if old is new:
        return []
    found = []
    for key, item in new.items():
        before = old.get(key)
        if before is not item and before != item:
            found.append(item)
    return found
