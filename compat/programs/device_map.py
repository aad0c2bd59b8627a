"""Loads a saved checkpoint straight onto the device by device_map."""

import sys
import tempfile

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

path = sys.argv[1]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=200,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
)
results = {}
with tempfile.TemporaryDirectory() as folder:
    LlamaForCausalLM(config).save_pretrained(folder)
    for name, dtype in {"float": torch.float32, "bfloat": torch.bfloat16}.items():
        model = AutoModelForCausalLM.from_pretrained(folder, device_map=device, dtype=dtype)
        model.eval()
        results[f"{name}.on device"] = all(p.device.type == device for p in model.parameters())
        for call in range(3):
            tokens = torch.randint(0, 200, (1, 8 + call)).to(model.device)
            with torch.no_grad():
                logits = model(tokens).logits
            results[f"{name}.logits{call}"] = logits.float().cpu()
torch.save(results, path)
