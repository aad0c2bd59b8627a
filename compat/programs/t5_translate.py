"""Translates token sequences with T5: the encoder once, the decoder step by step, then beams."""

import sys

import torch
from transformers import T5Config, T5ForConditionalGeneration

path = sys.argv[1]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
config = T5Config(
    vocab_size=200,
    d_model=64,
    d_kv=16,
    d_ff=128,
    num_layers=2,
    num_heads=4,
    decoder_start_token_id=0,
)
model = T5ForConditionalGeneration(config).to(device).eval()

results = {}
for call, beams in enumerate([1, 1, 3]):
    tokens = torch.randint(2, 200, (2, 9)).to(device)
    mask = torch.ones_like(tokens)
    answer = model.generate(
        tokens, attention_mask=mask, max_new_tokens=8, num_beams=beams, do_sample=False
    )
    results[f"answer{call}"] = answer.cpu()
with torch.no_grad():
    loss = model(input_ids=tokens, labels=tokens).loss
results["loss"] = float(loss)
torch.save(results, path)
