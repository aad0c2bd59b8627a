"""Scores and continues texts with a small decoder of a family of transformers: FAMILY."""

import sys
import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM

path, family = sys.argv[1], sys.argv[2]
device = "cuda" if torch.cuda.is_available() else "cpu"
VOCABULARY = 160
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "n_embd": 64,
    "d_model": 64,
    "ffn_dim": 128,
    "intermediate_size": 128,
    "ffn_hidden_size": 128,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "decoder_layers": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rotary_dim": 8,
    "max_position_embeddings": 128,
    "n_positions": 128,
    "max_seq_len": 128,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "sliding_window": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
OWN = {
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"]},
    "gpt_neo": {
        "attention_types": [[["global", "local"], 1]],
        "window_size": 8,
        "num_heads": 4,
        "intermediate_size": 128,
    },
    "deepseek_v2": {
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "num_key_value_heads": 4,
        "n_group": None,
        "topk_group": None,
        "first_k_dense_replace": 1,
    },
    "deepseek_v3": {
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
        "head_dim": 8,
    },
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "use_mamba_kernels": False,
        "mamba_dt_rank": 8,
    },
    "mamba": {"state_size": 8, "time_step_rank": 8},
    "falcon_mamba": {"state_size": 8, "time_step_rank": 8},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1, "state_size": 8, "chunk_size": 8},
    "bamba": {
        "attn_layer_indices": [1],
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 8,
    },
    "recurrent_gemma": {"lru_width": 64, "attention_window_size": 8, "num_hidden_layers": 3},
    "rwkv": {"attention_hidden_size": 64, "context_length": 64},
    "dots1": {"n_shared_experts": 1, "first_k_dense_replace": 1},
    "cohere2": {"layer_types": ["sliding_attention", "full_attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"]},
    "ctrl": {"dff": 128},
    "xlnet": {"d_inner": 128},
    "codegen": {"rotary_dim": 8, "n_ctx": 128},
    "falcon": {"num_kv_heads": 2, "new_decoder_architecture": True},
}

torch.manual_seed(0)
known = AutoConfig.for_model(family).to_dict()
small = {name: value for name, value in SMALL.items() if name in known}
config = AutoConfig.for_model(family, **(small | OWN.get(family, {})))
model = AutoModelForCausalLM.from_config(config).eval().to(device)

results = {}
with torch.inference_mode():
    tokens = torch.randint(3, VOCABULARY, (2, 9), device=device)
    mask = torch.ones_like(tokens)
    start = time.perf_counter()
    results["first"] = model(tokens, attention_mask=mask).logits.cpu()
    print(f"{(time.perf_counter() - start) * 1000:.2f} ms to the first answer")
    tokens = torch.randint(3, VOCABULARY, (2, 9), device=device)
    results["logits"] = model(tokens, attention_mask=mask).logits.cpu()
    text = model.generate(tokens, attention_mask=mask, max_new_tokens=6, do_sample=False)
    results["text"] = text.cpu()
    start = time.perf_counter()
    for _ in range(3):
        model(tokens, attention_mask=mask).logits.cpu()
    print(f"{(time.perf_counter() - start) / 3 * 1000:.2f} ms a call")
torch.save(results, path)
