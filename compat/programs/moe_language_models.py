"""Generates with a small mixture-of-experts language model; the family is named first."""

import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES = {
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {
        "num_experts": 4,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "decoder_sparse_step": 1,
    },
    "qwen3_moe": {
        "num_experts": 4,
        "moe_intermediate_size": 16,
        "head_dim": 8,
        "decoder_sparse_step": 1,
    },
    "deepseek_v3": {
        "n_routed_experts": 4,
        "moe_intermediate_size": 16,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
    },
    "gpt_oss": {"num_local_experts": 4, "head_dim": 8, "sliding_window": 16},
    "olmoe": {"num_experts": 4},
    "jamba": {
        "num_experts": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 4,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
}

path, family = sys.argv[1:]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
config = AutoConfig.for_model(family, **{**SMALL, **FAMILIES[family]})
model = AutoModelForCausalLM.from_config(config).to(device).eval()
tokens = torch.randint(3, 64, (2, 9)).to(device)
with torch.inference_mode():
    logits = model(tokens).logits
    text = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=6, do_sample=False
    )
torch.save({"logits": logits.cpu(), "text": text.cpu()}, path)
