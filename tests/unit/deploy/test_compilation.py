"""How the core is compiled."""

import ast
import sys

import pytest

from deploy.compiled.chosen_sources import relied_on
from deploy.compiled.compilation import optimisation
from tests.kit.places import ROOT


@pytest.mark.parametrize(
    ("flags", "level"),
    [("", "3"), ("-g -Wall", "3"), ("-O0", "0"), ("-O2 -g -O1", "1"), ("-Os", "s")],
)
def test_core_is_optimised_as_much_as_cflags_say(flags: str, level: str) -> None:
    assert optimisation(flags) == level


def test_image_compiles_with_every_package_whose_types_count() -> None:
    imported = set()
    for source in relied_on():
        for node in ast.walk(ast.parse((ROOT / source).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported |= {node.module.partition(".")[0]}
    others = {
        name
        for name in imported - sys.stdlib_module_names
        if not (ROOT / name).is_dir() and not (ROOT / f"{name}.py").is_file()
    }
    recipe = (ROOT / "deploy" / "docker" / "control.Dockerfile").read_text(encoding="utf-8")
    (installs,) = (line for line in recipe.splitlines() if "/opt/build/bin/pip install" in line)
    assert others <= set(installs.split())
