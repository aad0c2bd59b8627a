"""`gpufaas completion bash|zsh`: a script that completes commands, options and their values."""

import argparse
import shlex
from collections.abc import Iterator

from gpufaas.cli import make_parser
from gpufaas.options.shared import Commands

# The words before the one at the cursor: those that lead to a command's verb, and the last one.
_SCRIPT = """\
# Completes gpufaas in {shell}; written by `gpufaas completion {shell}`.
_gpufaas() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" last="${{COMP_WORDS[COMP_CWORD-1]}}"
    local place="" words="" i
    COMPREPLY=()
    for ((i = 1; i < COMP_CWORD; i++)); do
        if [[ "${{COMP_WORDS[i]}}" == -- ]]; then return; fi  # another program's words
        case "$place ${{COMP_WORDS[i]}}" in
            {places}) place="$place ${{COMP_WORDS[i]}}" ;;
        esac
    done
    case "$place $last" in
{values}
        *) case "$place" in
{words}
        esac ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _gpufaas gpufaas
"""
_ZSH = """\
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit; }
autoload -U +X bashcompinit && bashcompinit
"""
_BEFORE = {"bash": "", "zsh": _ZSH}


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("completion", help="a script that completes commands in a shell")
    parser.add_argument("shell", choices=sorted(_BEFORE), help="for which shell")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    print(_BEFORE[options.shell] + script(options.shell, make_parser(())), end="")
    return 0


def script(shell: str, parser: argparse.ArgumentParser) -> str:
    """What either shell runs for a word of `gpufaas`, with all that these parsers know."""
    found = list(_commands("", parser))
    return _SCRIPT.format(
        shell=shell,
        places="|".join(f'"{place}"' for place, _ in found if place),
        values="\n".join(_values(found)),
        words="\n".join(
            f'            "{place}") words={shlex.quote(" ".join(_words(of)))} ;;'
            for place, of in found
        ),
    )


def _commands(
    place: str, parser: argparse.ArgumentParser
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """A parser and those of its commands and their verbs, each with the words that lead there."""
    yield place, parser
    for action in _actions(parser):
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001 - no public name
            for name, of in action.choices.items():
                yield from _commands(f"{place} {name}", of)


def _actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return parser._actions  # noqa: SLF001 - no public name


def _words(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in _actions(parser):
        if action.option_strings:
            yield max(action.option_strings, key=len)
        elif action.choices is not None:
            yield from map(str, action.choices)


def _values(found: list[tuple[str, argparse.ArgumentParser]]) -> Iterator[str]:
    """After an option that takes a value: what to choose from, or a file's name."""
    for place, parser in found:
        for action in _actions(parser):
            if action.option_strings and action.nargs != 0:
                patterns = "|".join(f'"{place} {option}"' for option in action.option_strings)
                choices = " ".join(map(str, action.choices or ()))
                yield f"        {patterns}) words={shlex.quote(choices)} ;;"
