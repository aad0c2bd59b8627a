"""Where things lie in the checkout."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
ACTIVATE = ROOT / "torch_shim" / "activate"
