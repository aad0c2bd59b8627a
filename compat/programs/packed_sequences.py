"""Runs padded sequences through an LSTM as packed sequences."""

import sys

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

path = sys.argv[1]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 16, batch_first=True, bidirectional=True)

    def forward(self, padded, lengths):
        packed = pack_padded_sequence(padded, lengths, batch_first=True, enforce_sorted=False)
        output, (hidden, _) = self.lstm(packed)
        unpacked, seen = pad_packed_sequence(output, batch_first=True)
        return unpacked, hidden, seen


model = Encoder().to(device).eval()
results = {}
with torch.no_grad():
    for call, lengths in enumerate([[5, 3, 7], [2, 9, 4], [5, 3, 7]]):
        sequences = [torch.randn(length, 8).to(device) for length in lengths]
        padded = pad_sequence(sequences, batch_first=True)
        unpacked, hidden, seen = model(padded, torch.tensor(lengths))
        results[f"unpacked{call}"] = unpacked.cpu()
        results[f"hidden{call}"] = hidden.cpu()
        results[f"lengths{call}"] = seen.tolist()
torch.save(results, path)
