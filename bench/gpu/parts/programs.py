"""Programs of the compatibility suite under `gpufaas exec`, against the same programs on CUDA."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.gpu.gpu_bench import PartOptions, Say
from bench.measure.function_process import ROOT
from bench.measure.report import MeasurementFailed

# Plain ones of every kind. None draws random numbers on the GPU, whose generators differ.
PROGRAMS = (
    "resnet resnet18 1",
    "resnet resnet50 32",
    "vgg vgg16 1",
    "densenet densenet121 32",
    "squeezenet squeezenet1_1 32",
    "inception inception_v3 1",
    "vision_models vit_b_16 224",
    "segmentation lraspp_mobilenet_v3_large",
    "bert_classify",
    "gpt2_greedy",
    "llama_chat",
    "t5_translate",
    "lstm_text",
    "embedding_bags",
    "half_precision",
    "bfloat16_model",
    "autocast_mixed",
    "channels_last",
    "key_value_cache",
    "several_models",
)
_EMULATED = ("lstm_text",)
_AT_ONCE, _EACH_S = 6, 75


def measure(asked: PartOptions, say: Say) -> None:
    """One row a program; MeasurementFailed where one differs or fails."""
    names = _EMULATED if asked.emulated else PROGRAMS
    with tempfile.TemporaryDirectory(prefix="gpu-programs") as folder:
        kept = Path(folder) / "reports.jsonl"
        command = [sys.executable, "-m", "compat", *names]
        command += ["--devices", asked.devices, "--parallel", str(_AT_ONCE)]
        command += [
            "--limit",
            str(_EACH_S),
            "--within",
            f"{max(1.0, asked.left_s() - _EACH_S)}",
        ]
        command += ["--json", str(kept)]
        with subprocess.Popen(command, cwd=ROOT, env=asked.environment) as running:
            wrong, seen = _follow(running, kept, say)
    if wrong or seen < len(names):
        not_run = f"; {len(names) - seen} were not run" if seen < len(names) else ""
        raise MeasurementFailed(f"not equal: {', '.join(wrong) or 'none'}{not_run}")


def _follow(running: "subprocess.Popen[bytes]", kept: Path, say: Say) -> tuple[list[str], int]:
    """Give each report as soon as it is written; those that are not right, and their number."""
    wrong: list[str] = []
    seen, ended = 0, False
    while not ended:
        try:
            running.wait(1.0)
            ended = True
        except subprocess.TimeoutExpired:
            pass
        text = kept.read_text(encoding="utf-8") if kept.exists() else ""
        lines = text[: text.rfind("\n") + 1].splitlines()  # the last one may be half written
        for line in lines[seen:]:
            row = json.loads(line)
            wrong += [] if row["right"] else [row["program"]]
            say(row)
        seen = len(lines)
    return wrong, seen
