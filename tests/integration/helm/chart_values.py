"""Values files that the chart is rendered with."""

from pathlib import Path

FOLDER = Path(__file__).with_name("values")
VALUES = tuple(sorted(FOLDER.glob("*.yaml")))
