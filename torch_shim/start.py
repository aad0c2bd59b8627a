"""What the import hook calls once torch is there: the environment's settings, and all parts."""

import os

from torch_shim import install
from torch_shim.capture import module_calls
from torch_shim.settings import ShimSettings

# What plugs in after the handles are in place, in order.
HOOKS: list[install.Hook] = [module_calls.install]


def after_import() -> None:
    """Puts the shim in place as the environment says."""
    settings = ShimSettings.from_environment(os.environ)  # noqa: TID251 - the process's entry point
    install.install(settings, HOOKS)
