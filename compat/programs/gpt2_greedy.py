"""Continues a text greedily with GPT-2."""

import sys
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel

path = sys.argv[1]
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
config = GPT2Config(
    vocab_size=300,
    n_positions=128,
    n_embd=96,
    n_layer=3,
    n_head=4,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
model = GPT2LMHeadModel(config).to(device)
model.eval()

results = {}
for call in range(3):
    start = time.perf_counter()
    prompt = torch.randint(3, 300, (1, 6 + call), device=device)
    text = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False
    )
    results[f"text{call}"] = text.cpu()
    if call == 0:
        print(f"{(time.perf_counter() - start) * 1000:.2f} ms to the first answer")

start = time.perf_counter()
model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False)
print(f"{(time.perf_counter() - start) * 1000:.2f} ms a call")
torch.save(results, path)
