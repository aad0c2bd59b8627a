"""How long the long random lives are."""

from hypothesis import settings

# In `brief` the other core repeats what the first one has passed.
_SHORTER = {"ci": 3, "brief": 12}


def life_length(steps: int) -> int:
    """So many steps in the profile `thorough`; fewer in others, as there are fewer examples."""
    return steps // _SHORTER.get(settings.get_current_profile_name(), 1)
