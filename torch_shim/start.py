"""The entry point that the import hook calls after torch's import: reads the settings, installs."""

import os

from torch_shim import install
from torch_shim.capture import module_calls
from torch_shim.settings import ShimSettings

# The steps that run, in this order, after the handles are installed.
HOOKS: list[install.Hook] = [module_calls.install]


def after_import() -> None:
    """Install the shim with the environment's settings."""
    settings = ShimSettings.from_environment(os.environ)  # noqa: TID251 - the process's entry point
    install.install(settings, HOOKS)
