"""`gpufaas config show|sample`: settings as gpufaas.toml has them."""

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from gpufaas.options.configuration import AllSettings, read_settings, settings_file
from gpufaas.options.shared import Commands, add_verb

_HEAD = (
    "# Settings of gpufaas: docs/settings.md says what each is for. Those with a # are defaults.\n"
)


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("config", help="the settings in force, and a file to begin with")
    parser.set_defaults(run=_show, config=None)
    verbs = parser.add_subparsers(dest="verb")
    show = add_verb(verbs, "show", "every setting, as files and GPUFAAS_* say; others with a #")
    show.add_argument("--config", metavar="FILE", help="(gpufaas.toml here, or in /etc/gpufaas)")
    show.set_defaults(run=_show)
    sample = add_verb(verbs, "sample", "a gpufaas.toml with every setting's default")
    sample.set_defaults(run=_sample)


def _show(options: argparse.Namespace) -> int:
    settings = read_settings(options.config, options.environment, {})
    file = settings_file(options.config, options.environment)
    print(f"# {file or 'No gpufaas.toml'}, and GPUFAAS_* of this shell.")
    print(as_toml(settings), end="")
    return 0


def _sample(options: argparse.Namespace) -> int:
    del options
    print(as_toml(AllSettings()), end="")
    return 0


def as_toml(settings: AllSettings) -> str:
    """All settings as a file that says the same; those that are defaults begin with a #."""
    return _HEAD + "".join(f"{line}\n" for line in _lines(settings, AllSettings()))


def _lines(settings: Any, usual: Any, path: str = "") -> Iterator[str]:
    """The keys of a table, then the tables in it."""
    tables = {}
    for setting in fields(settings):
        name, value = setting.name, getattr(settings, setting.name)
        default = getattr(usual, name)
        if is_dataclass(value):
            tables[name] = _lines(value, default, f"{path}{name}.")
        elif isinstance(value, Mapping):
            tables[name] = iter([f"{_value(key)} = {_value(each)}" for key, each in value.items()])
        else:
            yield f"{'#' if value == default else ''}{name} = {_value(value)}"
    for name, lines in tables.items():
        yield ""
        yield f"[{path}{name}]"
        yield from lines


def _value(value: object) -> str:
    """As TOML writes it, which is how JSON does."""
    text = json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)
    return text.replace("\x7f", "\\u007f")
