"""Translates with a small encoder and decoder of a family of transformers: FAMILY."""

import sys
import time

import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM

path, family = sys.argv[1], sys.argv[2]
device = "cuda" if torch.cuda.is_available() else "cpu"
VOCABULARY = 160
SMALL = {
    "vocab_size": VOCABULARY,
    "d_model": 64,
    "hidden_size": 64,
    "d_ff": 128,
    "d_kv": 16,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "max_position_embeddings": 128,
    "max_encoder_position_embeddings": 128,
    "max_decoder_position_embeddings": 128,
    "attention_window": 8,
    "num_experts": 4,
    "expert_capacity": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
    "forced_bos_token_id": None,
}
OWN = {
    "prophetnet": {
        "num_encoder_layers": 2,
        "num_encoder_attention_heads": 4,
        "num_decoder_attention_heads": 4,
    },
    "longt5": {"local_radius": 4, "encoder_attention_type": "local"},
    "switch_transformers": {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "marian": {"decoder_vocab_size": VOCABULARY},
}

torch.manual_seed(0)
known = AutoConfig.for_model(family).to_dict()
small = {name: value for name, value in SMALL.items() if name in known}
config = AutoConfig.for_model(family, **(small | OWN.get(family, {})))
model = AutoModelForSeq2SeqLM.from_config(config).eval().to(device)

how = {"do_sample": False, "decoder_start_token_id": 1}
results = {}
with torch.inference_mode():
    text = torch.randint(4, VOCABULARY, (2, 16), device=device)
    mask = torch.ones_like(text)
    start_of = torch.full((2, 1), 1, device=device)
    start = time.perf_counter()
    results["first"] = model(text, decoder_input_ids=start_of).logits.cpu()
    print(f"{(time.perf_counter() - start) * 1000:.2f} ms to the first answer")
    for call in range(2):
        text = torch.randint(4, VOCABULARY, (2, 16), device=device)
        output = model.generate(text, attention_mask=mask, max_new_tokens=7, **how)
        results[f"text{call}"] = output.cpu()
    start = time.perf_counter()
    for _ in range(3):
        model(text, attention_mask=mask, decoder_input_ids=start_of).logits.cpu()
    print(f"{(time.perf_counter() - start) / 3 * 1000:.2f} ms a call")
torch.save(results, path)
