"""What `--help` says of each command: what it does, and examples to copy."""

import argparse
import textwrap
from collections.abc import Mapping, Sequence
from typing import NamedTuple

_WIDTH = 78


class HelpText(NamedTuple):
    """Sentences, and command lines without `gpufaas`."""

    description: str
    examples: tuple[str, ...]


HELP_TEXTS: Mapping[str, HelpText] = {
    "up": HelpText(
        "Runs etcd, a scheduler, a GPU manager and a gateway on this machine until Ctrl-C or "
        "`gpufaas down`. "
        "Without an NVIDIA GPU it emulates one; without torch functions have none.",
        ("up", "up --devices cpu:4 --port 9000", "up --examples --once"),
    ),
    "down": HelpText(
        "Stops what `gpufaas up` runs: calls in flight end first. Functions and settings are "
        "kept for the next `up`.",
        ("down", "down --state /srv/gpufaas"),
    ),
    "exec": HelpText(
        "Runs any program under the shim, on a GPU manager of its own: `.cuda()` and models go "
        "to its GPUs.",
        ("exec -- python your_script.py", "exec --stack --stats -- python your_script.py"),
    ),
    "check": HelpText(
        "Runs a script, or a handler with its example.json, and says by line what ran on the "
        "GPU, what did not, and why.",
        ("check your_script.py", "check feelings/handler.py"),
    ),
    "gpu-manager": HelpText(
        "Manages the GPUs of one node for a cluster's schedulers. On one machine `gpufaas up` "
        "starts it.",
        (
            "gpu-manager --scheduler http://10.0.0.1:7700",
            "gpu-manager --devices cpu:2 --listen unix:/run/gpufaas/node.sock",
        ),
    ),
    "scheduler": HelpText(
        "Decides which GPU runs each request of a cluster. On one machine `gpufaas up` starts it.",
        ("scheduler --policy gain", "scheduler --listen 0.0.0.0:7700 --etcd http://10.0.0.2:2379"),
    ),
    "gateway": HelpText(
        "Deploys and invokes functions by the REST API of OpenFaaS. On one machine `gpufaas up` "
        "starts it.",
        (
            "gateway --scheduler http://10.0.0.1:7700",
            "gateway --listen 0.0.0.0:8080 --node unix:/run/gpufaas/node.sock",
        ),
    ),
    "status": HelpText(
        "Shows the GPUs and the models on them, queues and latencies, each second; in a pipe once.",
        ("status", "status --once"),
    ),
    "top": HelpText(
        "Shows GPUs, functions, the queue and the last decisions on the whole terminal. Keys "
        "are at its foot.",
        ("top", "top --once"),
    ),
    "bill": HelpText(
        "Lists who used which GPU time and memory, and what that costs.",
        ("bill", "bill --by namespace --since 7d"),
    ),
    "policy": HelpText(
        "Shows or changes the rule by which requests are placed. A change loses no request, and "
        "is kept.",
        ("policy list", "policy get netgain", "policy set lalbo3 o3_limit=10"),
    ),
    "quota": HelpText(
        "Shows or sets shares, priorities and quotas of namespaces and functions.",
        ("quota list", "quota set team --weight 2 --gpu-seconds 30", "quota remove team/feelings"),
    ),
    "explain": HelpText(
        "Says why a call was placed where it was: the candidates, what each would have cost, "
        "and the rule.",
        ("explain", "explain c5d387de"),
    ),
    "trace": HelpText(
        "Shows where a call went, and what took how long there.",
        ("trace", "trace c5d387de"),
    ),
    "workflow": HelpText(
        "Deploys graphs of functions, and calls them as one.",
        (
            "workflow deploy workflow.yml",
            "workflow invoke describe-picture --body @cat.png",
            "workflow list",
        ),
    ),
    "models": HelpText(
        "Lists the models that a GPU manager or a cluster holds, or one of them.",
        ("models", "models feelings --json"),
    ),
    "prefetch": HelpText(
        "Loads a model before anybody calls it.",
        ("prefetch feelings", "prefetch 749cf589 --gpu vm/cuda:0"),
    ),
    "evict": HelpText(
        "Removes a model from GPUs; its next call loads it again.",
        ("evict feelings", "evict 749cf589 --gpu vm/cuda:0"),
    ),
    "pin": HelpText(
        "Keeps a model on GPUs whatever else wants their memory, until `gpufaas unpin`.",
        ("pin feelings", "pin 749cf589 --gpu vm/cuda:0"),
    ),
    "unpin": HelpText(
        "Ends what `gpufaas pin` began.",
        ("unpin feelings", "unpin 749cf589 --gpu vm/cuda:0"),
    ),
    "simulate": HelpText(
        "Runs policies on a simulated cluster, on the thesis's workload or a trace, and "
        "compares them in a table.",
        ("simulate --policy lalbo3 netgain gain", "simulate --policy lalbo3 --explain 400"),
    ),
    "reproduce": HelpText(
        "Repeats the experiments of a paper and writes a page with tables and pictures. It "
        "needs a checkout.",
        ("reproduce", "reproduce --paper sage"),
    ),
    "replay": HelpText(
        "Replays a recorded live run: checks each decision, or says what other policies would "
        "have done.",
        ("replay live.jsonl", "replay live.jsonl --policy all"),
    ),
    "demo": HelpText(
        "Simulates the thesis's workload under its policies and the best of ours: a table, and "
        "with matplotlib a picture.",
        ("demo", "demo --out pictures"),
    ),
    "doctor": HelpText(
        "Says what this machine lacks of what gpufaas can use, and how to get it.",
        ("doctor", "doctor --json"),
    ),
    "token": HelpText(
        "Prints a token for the scheduler's API, made of the cluster's secret: that of the file, "
        "else of the stack's folder in GPUFAAS_STATE.",
        ("token", "token --caller"),
    ),
    "config": HelpText(
        "Shows every setting as gpufaas.toml has it: what files and variables say here, or the "
        "defaults, as a file to begin with.",
        ("config show", "config sample"),
    ),
    "completion": HelpText(
        "Prints a script that completes commands, options and their values in a shell.",
        (
            "completion bash > ~/.local/share/bash-completion/completions/gpufaas",
            "completion zsh >> ~/.zshrc",
        ),
    ),
}


def explain_command(parser: argparse.ArgumentParser, name: str) -> None:
    """Have a command's `--help` begin with its description and end with its examples."""
    text = HELP_TEXTS[name]
    lines = "".join(f"  gpufaas {example}\n" for example in text.examples)
    more = f"\n{textwrap.fill(parser.epilog, _WIDTH)}\n" if parser.epilog else ""
    parser.description = text.description
    parser.epilog = f"examples:\n{lines}{more}"
    parser.formatter_class = _Formatter


def explain_lacking(parser: argparse.ArgumentParser, commands: Mapping[str, Sequence[str]]) -> None:
    """Have `gpufaas --help` end with the commands that are not there, by what installs them."""
    lines = [f"  {command}\n    {', '.join(names)}\n" for command, names in commands.items()]
    if lines:
        parser.epilog = f"with more packages:\n{''.join(lines)}"
        parser.formatter_class = _Formatter


class _Formatter(argparse.HelpFormatter):
    """Leaves lines that are to be copied as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)
