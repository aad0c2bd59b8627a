"""Generates with a small Llama: left-padded batch, its cache, and a hand-written decoding loop."""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

path = sys.argv[1]
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
model = LlamaForCausalLM(config).to(device).eval()

results = {}
for call in range(3):
    tokens = torch.randint(3, 256, (2, 7))
    mask = torch.ones_like(tokens)
    tokens[0, :3] = 0
    mask[0, :3] = 0
    text = model.generate(
        tokens.to(device), attention_mask=mask.to(device), max_new_tokens=8, do_sample=False
    )
    results[f"text{call}"] = text.cpu()

with torch.inference_mode():
    step = torch.randint(3, 256, (1, 5), device=device)
    past = None
    words = []
    for _ in range(8):
        output = model(step, past_key_values=past, use_cache=True)
        past = output.past_key_values
        step = output.logits[:, -1].argmax(dim=-1, keepdim=True)
        words.append(step.item())
    results["words"] = words
    results["logits"] = output.logits.cpu()
torch.save(results, path)
