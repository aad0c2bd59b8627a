"""Labels every token with RoBERTa, and forgets no_grad."""

import sys

import torch
from transformers import RobertaConfig, RobertaForTokenClassification

path = sys.argv[1]
torch.manual_seed(0)
config = RobertaConfig(
    vocab_size=400,
    hidden_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    intermediate_size=128,
    max_position_embeddings=80,
    num_labels=5,
)
model = RobertaForTokenClassification(config).eval()
if torch.cuda.is_available():
    model = model.cuda()

results = {}
for call, length in enumerate([16, 24, 16]):
    tokens = torch.randint(3, 400, (2, length))
    tokens[0, -4:] = config.pad_token_id
    mask = (tokens != config.pad_token_id).long()
    labels = torch.randint(0, 5, (2, length))
    output = model(
        input_ids=tokens.to(model.device),
        attention_mask=mask.to(model.device),
        labels=labels.to(model.device),
    )
    results[f"loss{call}"] = output.loss.item()
    results[f"logits{call}"] = output.logits.detach().cpu()
torch.save(results, path)
