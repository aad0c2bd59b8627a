"""Saves a model with save_pretrained, loads it again, moves it and uses it."""

import sys
import tempfile

import torch
from transformers import AutoModel, DistilBertConfig, DistilBertModel

path = sys.argv[1]
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
config = DistilBertConfig(vocab_size=200, dim=64, n_layers=2, n_heads=4, hidden_dim=128)
results = {}
with tempfile.TemporaryDirectory() as folder:
    original = DistilBertModel(config).to(device).eval()
    original.save_pretrained(folder)
    loaded = AutoModel.from_pretrained(folder).to(device).eval()
for call in range(3):
    tokens = torch.randint(0, 200, (2, 12), device=device)
    with torch.no_grad():
        before = original(tokens).last_hidden_state
        after = loaded(tokens).last_hidden_state
    results[f"same{call}"] = torch.equal(before, after)
    results[f"hidden{call}"] = after.cpu()
torch.save(results, path)
