"""docs/settings.md lists every setting, option of a function and parameter of a policy."""

import re
from dataclasses import fields, is_dataclass

from gateway_ext.openfaas.function_options import KEYS, OURS, TEMPLATE_STATE, TROUBLE
from gpufaas.options.configuration import AllSettings
from scheduler import policies
from tests.kit.places import ROOT

_TEXT = (ROOT / "docs/settings.md").read_text(encoding="utf-8")
_NAMES = re.compile(r"`([\w-]+)`")


def test_settings_page_lists_the_settings_that_there_are() -> None:
    tables = {each.name: getattr(AllSettings(), each.name) for each in fields(AllSettings)}
    wrong = {}
    for name, table in tables.items():
        if is_dataclass(table):
            known = {each.name for each in fields(table)}
            if (listed := _first_cells(f"`[{name}]`")) != known:
                wrong[name] = listed ^ known
    assert wrong == {}
    plain = {name for name, table in tables.items() if not is_dataclass(table)}
    assert _first_cells("setting") == plain


def test_settings_page_lists_the_options_of_a_function() -> None:
    settable = {each.removeprefix(OURS) for each in KEYS - {TROUBLE, TEMPLATE_STATE}}
    assert _first_cells("`com.gpufaas.`") == settable


def test_settings_page_lists_the_parameters_of_policies() -> None:
    rows = [row.split("|") for row in _TEXT.partition("| policy |")[2].splitlines()[2:]]
    listed = {
        (policy, parameter)
        for cells in rows
        for policy in _NAMES.findall(cells[1])
        for parameter in _NAMES.findall(cells[2])
    }
    known = {
        (policy, parameter)
        for policy in policies.available()
        for parameter in policies.describe(policy).parameters
    }
    assert listed == known


def _first_cells(head: str) -> set[str]:
    """The names in the first column of the table whose head begins so."""
    table = _TEXT.partition(f"\n| {head} |")[2].partition("\n\n")[0]
    return {name for row in table.splitlines()[2:] for name in _NAMES.findall(row.split("|")[1])}
