"""Adapts a small language model with a method of peft, merges where it can: METHOD."""

import sys
import time

import peft
import torch
from transformers import LlamaConfig, LlamaForCausalLM

path, method = sys.argv[1], sys.argv[2]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
WHERE = {"target_modules": ["q_proj", "v_proj"]}
METHODS = {
    "lora": lambda: peft.LoraConfig(r=4, init_lora_weights=False, **WHERE),
    "dora": lambda: peft.LoraConfig(r=4, use_dora=True, init_lora_weights=False, **WHERE),
    "rslora": lambda: peft.LoraConfig(r=4, use_rslora=True, init_lora_weights=False, **WHERE),
    "adalora": lambda: peft.AdaLoraConfig(init_r=4, total_step=10, **WHERE),
    "ia3": lambda: peft.IA3Config(feedforward_modules=[], init_ia3_weights=False, **WHERE),
    "loha": lambda: peft.LoHaConfig(r=4, init_weights=False, **WHERE),
    "lokr": lambda: peft.LoKrConfig(r=4, init_weights=False, **WHERE),
    "oft": lambda: peft.OFTConfig(oft_block_size=8, init_weights=False, **WHERE),
    "boft": lambda: peft.BOFTConfig(boft_block_size=4, init_weights=False, **WHERE),
    "vera": lambda: peft.VeraConfig(r=4, init_weights=False, **WHERE),
    "hra": lambda: peft.HRAConfig(r=4, init_weights=False, **WHERE),
    "fourierft": lambda: peft.FourierFTConfig(n_frequency=20, init_weights=True, **WHERE),
    "prompt": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "prefix": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "layernorm": lambda: peft.LNTuningConfig(target_modules=["input_layernorm"]),
}
config = LlamaConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=64,
)
model = peft.get_peft_model(LlamaForCausalLM(config), METHODS[method]()).eval().to(device)

results = {}
with torch.no_grad():
    for call in range(3):
        tokens = torch.randint(3, 128, (2, 9)).to(device)
        start = time.perf_counter()
        results[f"logits{call}"] = model(
            tokens, attention_mask=torch.ones_like(tokens)
        ).logits.cpu()
        if call == 0:
            print(f"{(time.perf_counter() - start) * 1000:.2f} ms to the first answer")
    if method not in {"prompt", "prefix"}:
        with model.disable_adapter():
            results["without"] = model(tokens).logits.cpu()
        merged = model.merge_and_unload()
        results["merged"] = merged(tokens).logits.cpu()
torch.save(results, path)
