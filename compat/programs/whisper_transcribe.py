"""Transcribes spectrograms with Whisper."""

import sys

import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration

path = sys.argv[1]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
config = WhisperConfig(
    vocab_size=200,
    num_mel_bins=16,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    d_model=64,
    encoder_ffn_dim=128,
    decoder_ffn_dim=128,
    max_source_positions=50,
    max_target_positions=40,
    decoder_start_token_id=1,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
model = WhisperForConditionalGeneration(config).to(device).eval()

results = {}
with torch.inference_mode():
    for call in range(3):
        sound = torch.randn(1, 16, 100).to(device)
        hidden = model.model.encoder(sound).last_hidden_state
        words = torch.tensor([[1]], device=device)
        for _ in range(8):
            logits = model(encoder_outputs=(hidden,), decoder_input_ids=words).logits
            words = torch.cat([words, logits[:, -1:].argmax(-1)], dim=1)
        results[f"words{call}"] = words.cpu()
        results[f"logits{call}"] = logits.cpu()
torch.save(results, path)
