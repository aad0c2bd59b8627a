"""How long the long random lives are."""

from hypothesis import settings


def life_length(steps: int) -> int:
    """So many steps in the profile `thorough`; a third otherwise, as there are fewer examples."""
    return steps if settings.get_current_profile_name() == "thorough" else steps // 3
