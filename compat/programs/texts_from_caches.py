"""Writes texts in the way WAY, with caches that are large enough to stay where the model is."""

import copy
import sys
import threading
import time

import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    TextIteratorStreamer,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

path, way = sys.argv[1], sys.argv[2]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
LENGTH, PROMPT = 16, 72
DECODER = {
    "vocab_size": 128,
    "hidden_size": 256,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
HOW = {"max_new_tokens": LENGTH, "min_new_tokens": LENGTH, "do_sample": False}


class Letters:
    """A tokenizer whose every token is a letter."""

    def decode(self, tokens, **_):
        return "".join(chr(33 + int(token) % 90) for token in tokens)


def plain(model, tokens, **how):
    mask = (tokens != 0).long()
    return model.generate(tokens, **({"attention_mask": mask} | HOW | how))


def left_padded(model, tokens):
    tokens = tokens.clone()
    tokens[0, :30] = 0
    return plain(model, tokens, num_beams=2)


def speculative(model, tokens):
    """A second model proposes, this one checks; the cache is cut back where they disagree."""
    assistant = LlamaForCausalLM(LlamaConfig(**(DECODER | {"num_hidden_layers": 1})))
    return plain(model, tokens[:1], assistant_model=assistant.eval().to(device))


def looked_up(model, tokens):
    return plain(model, tokens[:1].repeat(1, 2), prompt_lookup_num_tokens=4)


def static(model, tokens):
    return plain(model, tokens, cache_implementation="static", disable_compile=True)


def penalised(model, tokens):
    how = {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2, "encoder_repetition_penalty": 1.1}
    return plain(model, tokens, **how)


def contrasted(model, tokens):
    """Contrastive search by hand: candidates are tried over copies of one cache."""
    with torch.inference_mode():
        output = model(tokens[:1], use_cache=True, output_hidden_states=True)
        cache, seen, words = output.past_key_values, output.hidden_states[-1], []
        for _ in range(6):
            chances, candidates = output.logits[:, -1].softmax(-1).topk(3)
            tried = []
            for candidate in candidates[0]:
                branch = copy.deepcopy(cache)
                step = candidate.view(1, 1)
                found = model(step, past_key_values=branch, output_hidden_states=True)
                alike = torch.cosine_similarity(seen, found.hidden_states[-1], dim=-1).max()
                tried.append((found, branch, step, alike))
            alike = torch.stack([one[3] for one in tried])
            best = int((chances[0] * 0.6 - alike * 0.4).argmax())
            output, cache, step, _ = tried[best]
            seen = torch.cat([seen, output.hidden_states[-1]], dim=1)
            words.append(step)
    return torch.cat(words, dim=1)


def shared_prompt(model, tokens):
    """One cache of a common prompt, from copies of which several texts go on."""
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(tokens, past_key_values=cache)
    texts = []
    for number in (5, 6):
        more = torch.cat([tokens, torch.full_like(tokens[:, :2], number)], dim=1)
        texts.append(plain(model, more, past_key_values=copy.deepcopy(cache)))
    return torch.stack(texts)


def cropped(model, tokens):
    """A turn is taken back: the cache is cut, and goes on with other words."""
    first = plain(model, tokens, return_dict_in_generate=True)
    cache = first.past_key_values
    cache.crop(PROMPT - cache.get_seq_length())
    return plain(model, torch.cat([tokens, tokens[:, :3]], dim=1), past_key_values=cache)


def repeated_cache(model, tokens):
    """One prompt computed once, several texts sampled from it."""
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        output = model(tokens[:1], past_key_values=cache)
        cache.batch_repeat_interleave(3)
        step, words = output.logits[:, -1].topk(3).indices.view(3, 1), []
        for _ in range(8):
            words.append(step)
            step = model(step, past_key_values=cache).logits[:, -1:].argmax(-1)
        cache.batch_select_indices(torch.tensor([2, 0], device=tokens.device))
        step = step[[2, 0]]
        last = model(step, past_key_values=cache).logits
    return torch.cat([torch.cat(words, dim=1).float().flatten(), last.flatten()])


def streamed_by_two(model, tokens):
    """Two requests at the same time, each streamed from a thread of its own."""
    found = {}

    def serve(number):
        streamer = TextIteratorStreamer(Letters())
        writer = threading.Thread(
            target=plain, args=(model, tokens[number : number + 1]), kwargs={"streamer": streamer}
        )
        writer.start()
        found[number] = "".join(streamer)
        writer.join()

    servers = [threading.Thread(target=serve, args=(number,)) for number in range(2)]
    for server in servers:
        server.start()
    for server in servers:
        server.join()
    return torch.tensor([ord(letter) for number in range(2) for letter in found[number]])


def from_text(model, tokens):
    return plain(model, tokens)


def beams_from_text(model, tokens):
    return plain(model, tokens, num_beams=3)


def from_sound(model, tokens):
    del tokens
    sound = torch.randn(2, 16, 100).to(device)
    return model.generate(sound, **HOW)


def causal(kind, config, **more):
    return kind(config(**(DECODER | more)))


def model_for(way):
    if way == "gemma2_hybrid":
        return causal(Gemma2ForCausalLM, Gemma2Config, sliding_window=24)
    if way == "gemma3_sliding":
        return causal(Gemma3ForCausalLM, Gemma3TextConfig, sliding_window=24)
    if way.startswith("mistral"):
        return causal(MistralForCausalLM, MistralConfig, sliding_window=24)
    if way.startswith("t5"):
        sizes = {"vocab_size": 128, "d_model": 256, "d_kv": 64, "d_ff": 256, "num_heads": 4}
        return T5ForConditionalGeneration(
            T5Config(**sizes, num_layers=2, decoder_start_token_id=0, eos_token_id=1)
        )
    if way.startswith("bart"):
        sides = {f"{side}_{what}": size for side in ("encoder", "decoder") for what, size in
                 {"layers": 2, "attention_heads": 4, "ffn_dim": 256}.items()}  # fmt: skip
        return BartForConditionalGeneration(BartConfig(vocab_size=128, d_model=256, **sides))
    if way == "whisper":
        sides = {f"{side}_{what}": size for side in ("encoder", "decoder") for what, size in
                 {"layers": 2, "attention_heads": 4, "ffn_dim": 256}.items()}  # fmt: skip
        tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        return WhisperForConditionalGeneration(
            WhisperConfig(
                vocab_size=128, d_model=256, num_mel_bins=16, max_source_positions=50,
                max_target_positions=64, decoder_start_token_id=3, suppress_tokens=None,
                begin_suppress_tokens=None, **sides, **tokens,
            )
        )  # fmt: skip
    return causal(LlamaForCausalLM, LlamaConfig)


WRITERS = {
    "gemma2_hybrid": plain,
    "gemma3_sliding": plain,
    "mistral_sliding": plain,
    "mistral_static": static,
    "t5": from_text,
    "t5_beams": beams_from_text,
    "bart": from_text,
    "bart_beams": beams_from_text,
    "whisper": from_sound,
}
model = model_for(way).to(device).eval()
results = {}
for call in range(2):
    tokens = torch.randint(3, 128, (2, PROMPT)).to(device)
    start = time.perf_counter()
    results[f"text{call}"] = WRITERS.get(way, globals().get(way))(model, tokens).cpu()
    if call == 0:
        print(f"{(time.perf_counter() - start) * 1000:.2f} ms to the first answer")
torch.save(results, path)
