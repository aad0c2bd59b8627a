"""Continues texts by sampling from GPT-2, seeded: the same words each time."""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, set_seed

path = sys.argv[1]
device = "cuda" if torch.cuda.is_available() else "cpu"
set_seed(7)
config = GPT2Config(
    vocab_size=300, n_positions=64, n_embd=64, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2
)
model = GPT2LMHeadModel(config).eval().to(device)

results = {}
for call in range(3):
    set_seed(100 + call)
    prompt = torch.randint(3, 300, (2, 5)).to(device)
    with torch.no_grad():
        text = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=True,
            temperature=0.8,
            top_k=20,
            top_p=0.95,
            max_new_tokens=10,
            num_return_sequences=2,
            pad_token_id=0,
        )
    results[f"text{call}"] = text.cpu()
    scores = model(text).logits.detach().log_softmax(-1)
    results[f"likelihood{call}"] = scores.gather(-1, text.unsqueeze(-1)).mean().item()
torch.save(results, path)
