"""Generates texts with a small decoder in one of the ways that transformers offers: WAY."""

import sys
import threading
import time

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    MistralConfig,
    MistralForCausalLM,
    StaticCache,
    StoppingCriteria,
    TextIteratorStreamer,
)

path, way = sys.argv[1], sys.argv[2]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LENGTH = 8


class Letters:
    """A tokenizer whose every token is a letter."""

    def decode(self, tokens, **_):
        return "".join(chr(33 + int(token) % 90) for token in tokens)


class NoOddTokens(LogitsProcessor):
    """Allows only even tokens."""

    def __call__(self, input_ids, scores):
        allowed = torch.arange(scores.shape[-1], device=scores.device) % 2 == 0
        return scores.masked_fill(~allowed, float("-inf"))


class AfterSum(StoppingCriteria):
    """Stops when the tokens' sum is large."""

    def __call__(self, input_ids, scores, **_):
        return input_ids.sum(-1) > 900


def plain(model, tokens, **how):
    mask = torch.ones_like(tokens)
    how = {"max_new_tokens": LENGTH, "do_sample": False} | how
    return model.generate(tokens, attention_mask=mask, **how)


def sampled(model, tokens):
    torch.manual_seed(5)
    return plain(model, tokens, do_sample=True, temperature=0.8, top_k=20, top_p=0.9)


def typical(model, tokens):
    torch.manual_seed(6)
    return plain(model, tokens, do_sample=True, typical_p=0.9, min_p=0.01, repetition_penalty=1.2)


def several(model, tokens):
    torch.manual_seed(7)
    return plain(model, tokens, do_sample=True, num_return_sequences=3)


def beams(model, tokens):
    return plain(model, tokens, num_beams=3, num_return_sequences=2)


def sampled_beams(model, tokens):
    torch.manual_seed(8)
    return plain(model, tokens, num_beams=3, do_sample=True)


def static_cache(model, tokens):
    return plain(model, tokens, cache_implementation="static", disable_compile=True)


def own_static_cache(model, tokens):
    """A decoding loop of its own over a cache of fixed size."""
    cache = StaticCache(config=model.config, max_cache_len=32)
    words, step, place = [], tokens, torch.arange(tokens.shape[1], device=tokens.device)
    with torch.inference_mode():
        for _ in range(LENGTH):
            output = model(step, past_key_values=cache, cache_position=place, use_cache=True)
            step = output.logits[:, -1:].argmax(-1)
            place = place[-1:] + 1
            words.append(step)
    return torch.cat(words, dim=1)


def quantity_of_scores(model, tokens):
    output = plain(model, tokens, output_scores=True, return_dict_in_generate=True)
    return torch.stack(output.scores)


def no_cache(model, tokens):
    return plain(model, tokens, use_cache=False)


def processors(model, tokens):
    return plain(model, tokens, logits_processor=[NoOddTokens()], no_repeat_ngram_size=2)


def stopping(model, tokens):
    return plain(model, tokens, stopping_criteria=[AfterSum()])


def assisted(model, tokens):
    torch.manual_seed(9)
    assistant = LlamaForCausalLM(LlamaConfig(**(SIZES | {"num_hidden_layers": 1})))
    return plain(model, tokens[:1], assistant_model=assistant.eval().to(device))


def prompt_lookup(model, tokens):
    return plain(model, tokens[:1].repeat(1, 2), prompt_lookup_num_tokens=3)


def streamed(model, tokens):
    """Pieces from a thread, as a server sends them on."""
    streamer = TextIteratorStreamer(Letters())
    how = {"streamer": streamer}
    thread = threading.Thread(target=plain, args=(model, tokens[:1]), kwargs=how)
    thread.start()
    pieces = "".join(streamer)
    thread.join()
    return torch.tensor([ord(letter) for letter in pieces])


def continued(model, tokens):
    """A chat: each turn goes on from the last one's cache."""
    first = plain(model, tokens, return_dict_in_generate=True)
    more = torch.cat([first.sequences, tokens[:, :2]], dim=1)
    return plain(model, more, past_key_values=first.past_key_values)


def padded(model, tokens):
    tokens = tokens.clone()
    tokens[0, :3] = 0
    return model.generate(
        tokens, attention_mask=(tokens != 0).long(), max_new_tokens=LENGTH, do_sample=False
    )


def embedded(model, tokens):
    """A prompt that is given as vectors."""
    vectors = model.get_input_embeddings()(tokens)
    return model.generate(
        inputs_embeds=vectors,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=LENGTH,
        do_sample=False,
    )


def sliding_window(model, tokens):
    return plain(model, tokens.repeat(1, 2), max_new_tokens=12)


def reordered(model, tokens):
    """A beam search of its own, whose cache is reordered in place."""
    with torch.inference_mode():
        output = model(tokens, use_cache=True)
        cache, scores = output.past_key_values, output.logits[:, -1].log_softmax(-1)
        for _ in range(4):
            order = scores.max(-1).values.argsort(descending=True)
            cache.reorder_cache(order)
            step = scores[order].argmax(-1, keepdim=True)
            output = model(step, past_key_values=cache, use_cache=True)
            scores = output.logits[:, -1].log_softmax(-1)
    return scores


if way == "sliding_window":
    model = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=6))
else:
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
model = model.to(device).eval()
results = {}
for call in range(2):
    tokens = torch.randint(3, 128, (2, 7)).to(device)
    start = time.perf_counter()
    results[f"text{call}"] = globals()[way](model, tokens).cpu()
    if call == 0:
        print(f"{(time.perf_counter() - start) * 1000:.2f} ms to the first answer")
torch.save(results, path)
