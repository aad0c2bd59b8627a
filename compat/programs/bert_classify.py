"""Classifies padded token sequences with BERT."""

import sys
import time

import torch
from transformers import BertConfig, BertForSequenceClassification

path = sys.argv[1]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
config = BertConfig(
    vocab_size=500,
    hidden_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    intermediate_size=256,
    num_labels=3,
)
model = BertForSequenceClassification(config).to(device).eval()

results = {}
for call, (batch, length) in enumerate([(1, 12), (4, 12), (4, 20), (1, 12)]):
    start = time.perf_counter()
    tokens = torch.randint(0, 500, (batch, length))
    mask = torch.ones_like(tokens)
    if batch > 1:
        mask[1, length // 2 :] = 0
    with torch.no_grad():
        output = model(tokens.to(device), attention_mask=mask.to(device))
    results[f"logits{call}"] = output.logits.cpu()
    if call == 0:
        print(f"{(time.perf_counter() - start) * 1000:.2f} ms to the first answer")
    results[f"label{call}"] = output.logits.argmax(-1).tolist()

inputs = {"input_ids": tokens.to(device), "attention_mask": mask.to(device)}
with torch.no_grad():
    start = time.perf_counter()
    for _ in range(5):
        model(**inputs).logits.cpu()
    print(f"{(time.perf_counter() - start) / 5 * 1000:.2f} ms a call")
torch.save(results, path)
