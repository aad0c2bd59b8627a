"""A small transformer in bfloat16, turned back to float32 in the middle of the program."""

import sys

import torch
from torch import nn

path = sys.argv[1]
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True)
model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
model = model.to(device, dtype=torch.bfloat16)

results = {}
with torch.no_grad():
    for call in range(6):
        if call == 3:
            model = model.float()
        dtype = next(model.parameters()).dtype
        x = torch.randn(2, 5, 32, device=device).to(dtype)
        mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2], device=device)
        y = model(x, src_key_padding_mask=mask if call % 2 else None)
        results[f"dtype{call}"] = str(y.dtype)
        results[f"output{call}"] = y.cpu()
torch.save(results, path)
