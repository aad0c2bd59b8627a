"""`python -m bench.generation`: a language model writes, natively and through the shim.

The two processes take turns. Both write the same text, which is checked.
"""

import argparse
import sys
from statistics import median
from typing import NamedTuple

from bench.measure.native_and_shim import NativeAndShim
from bench.measure.report import MeasurementFailed

_WAYS = {
    "greedy": "greedy, growing cache",
    "sampled": "sampling, growing cache",
    "static": "greedy, static cache written in place",
    "beams": "four beams, growing cache",
}
_PROGRAM = """
import json, sys, time
import torch
from transformers import LlamaConfig, LlamaForCausalLM

way, hidden, layers, tokens, prompt, rounds = sys.argv[1], *map(int, sys.argv[2:])
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=4096, hidden_size=hidden, intermediate_size=hidden * 11 // 4,
    num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=8,
    max_position_embeddings=4096)).eval()
device = "cuda" if torch.cuda.is_available() else "cpu"
model, ids = model.to(device), torch.randint(0, 4096, (1, prompt)).to(device)
how = {
    "greedy": {}, "sampled": {"do_sample": True}, "beams": {"num_beams": 4},
    "static": {"cache_implementation": "static", "disable_compile": True},
}[way]
how = {"do_sample": False, "pad_token_id": 0} | how
how |= {"max_new_tokens": tokens, "min_new_tokens": tokens}

def bytes_sent():
    try:
        from torch_shim.process_report import report
    except ImportError:
        return 0
    return report.counts.bytes_in + report.counts.bytes_out

with torch.no_grad():
    began_s = time.perf_counter()
    model(ids)[0].sum().item()
    first_s = time.perf_counter() - began_s
    spent_s, sent_bytes = [], []
    for _ in range(rounds):
        torch.manual_seed(1)
        before, began_s = bytes_sent(), time.perf_counter()
        text = model.generate(ids, **how)[0].tolist()
        spent_s.append(time.perf_counter() - began_s)
        sent_bytes.append(bytes_sent() - before)
print(json.dumps({"first_s": first_s, "spent_s": spent_s, "sent_bytes": sent_bytes, "text": text}))
"""


class Writing(NamedTuple):
    """What one process measured, in the order of its texts."""

    first_s: float
    spent_s: list[float]
    sent_bytes: list[int]
    text: list[int]


def main() -> int:
    """Measure, print a table, and keep it if asked to."""
    bench = NativeAndShim("generation", "Writing with a language model", _PROGRAM, _WAYS)
    add = bench.parser.add_argument
    add("--hidden", type=int, default=512, metavar="N", help="width (512)")
    add("--layers", type=int, default=12, metavar="N", help="layers (12)")
    add("--tokens", type=int, default=100, metavar="N", help="a text (100)")
    add("--prompt", type=int, default=16, metavar="N", help="tokens (16)")
    add("--rounds", type=int, default=3, metavar="N", help="texts a process (3)")
    options = bench.parser.parse_args()
    return bench.measure(
        options,
        f"A llama of {options.layers} layers of {options.hidden}, random weights, a prompt of "
        f"{options.prompt} tokens and {options.tokens} new ones, {options.rounds} texts a process",
        "native | shim | shim / native | first text | first forward | KiB a token",
        lambda way: _row(bench, way, options),
    )


def _row(bench: NativeAndShim, way: str, options: argparse.Namespace) -> str:
    numbers = (options.hidden, options.layers, options.tokens, options.prompt, options.rounds)
    pairs = bench.pairs(Writing, way, numbers, options)
    if any(native.text != shim.text for native, shim in pairs):
        raise MeasurementFailed(f"the two texts of {way} differ")
    rates = [[options.tokens / min(one.spent_s[1:]) for one in pair] for pair in pairs]
    native, ours = (median(rate[number] for rate in rates) for number in (0, 1))
    ratio = median(rate[1] / rate[0] for rate in rates)
    first = median(options.tokens / shim.spent_s[0] for _, shim in pairs)
    forward = median(shim.first_s / native.first_s for native, shim in pairs)
    sent = median(shim.sent_bytes[-1] / options.tokens / 1024 for _, shim in pairs)
    return (
        f"{native:.1f} tokens/s | {ours:.1f} tokens/s | {ratio:.2f} | "
        f"{first:.1f} tokens/s | {forward:.0f} x native | {sent:.1f}"
    )


if __name__ == "__main__":
    sys.exit(main())
