"""How long the long random lives are."""

from hypothesis import settings

_BRIEF = 12  # how much shorter where the other core repeats what the first one has passed


def life_length(steps: int) -> int:
    """So many steps; fewer in the profile `brief`, as hypothesis takes fewer examples there."""
    return steps // _BRIEF if settings.get_current_profile_name() == "brief" else steps
