"""Sentence embeddings by BERT: pooled over the mask, normalised; all hidden states asked for."""

import sys

import torch
import torch.nn.functional as F
from transformers import BertConfig, BertModel

path = sys.argv[1]
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
config = BertConfig(
    vocab_size=300,
    hidden_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    intermediate_size=128,
    attn_implementation="eager",
)
encoder = BertModel(config, add_pooling_layer=False).to(device)
encoder.eval()


def mean_pool(hidden, mask):
    weights = mask.unsqueeze(-1).expand(hidden.size()).float()
    return torch.sum(hidden * weights, 1) / torch.clamp(weights.sum(1), min=1e-9)


def embed(tokens, mask):
    inputs = {"input_ids": tokens, "attention_mask": mask}
    inputs = {key: value.to(device) for key, value in inputs.items()}
    with torch.no_grad():
        output = encoder(**inputs, output_hidden_states=True, output_attentions=True)
    return F.normalize(mean_pool(output[0], inputs["attention_mask"]), p=2, dim=1), output


results = {}
for call in range(3):
    tokens = torch.randint(1, 300, (3, 10))
    mask = torch.ones_like(tokens)
    mask[0, 5 + call :] = 0
    embedding, output = embed(tokens, mask)
    results[f"embedding{call}"] = embedding.cpu()
    results[f"similarity{call}"] = (embedding @ embedding.T).cpu()
    results[f"layers{call}"] = [state.mean(dim=1).cpu() for state in output.hidden_states]
    results[f"attention{call}"] = output.attentions[-1].sum(dim=1).cpu()
torch.save(results, path)
