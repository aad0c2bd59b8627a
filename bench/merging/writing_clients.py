"""Clients of a small llama, each of which writes one text after the other, token by token.

`generate` of transformers, greedily; the prompts are of different lengths, so the texts' caches
are too, and each client's next text begins when its last one ends.
"""

import time
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

_TOKENS, _PROMPTS, _WORDS = 48, 8, 4096
_WAYS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama_static": {"cache_implementation": "static", "disable_compile": True},
}
WRITERS = tuple(_WAYS)

Text = tuple[torch.Tensor, list[int]]


class _TextOver(Exception):
    """The time is over in the midst of a text."""


class _Clock:
    """Notes how long each token took; transformers gives it the prompt first."""

    def __init__(self, seconds: list[float], end_s: float) -> None:
        self._seconds, self._end_s = seconds, end_s
        self._last_s: float | None = None

    def put(self, _: torch.Tensor) -> None:
        """Take the next token."""
        now_s = time.perf_counter()
        if self._last_s is not None:
            self._seconds.append(now_s - self._last_s)
        self._last_s = now_s
        if now_s > self._end_s:
            raise _TextOver

    def end(self) -> None:
        """The text is complete."""


class WritingClient:
    """One client: the same text again and again, whose tokens are known."""

    def __init__(self, way: str, model: torch.nn.Module, text: Text) -> None:
        self._way, self._model = way, model
        self._prompt, self._expected = text
        self.seconds: list[float] = []  # of each token
        self.wrong = 0

    def call_until(self, end_s: float) -> None:
        """Write until then."""
        torch.set_grad_enabled(False)
        try:
            while time.perf_counter() < end_s:
                clock = _Clock(self.seconds, end_s)
                found = _written(self._way, self._model, self._prompt.cuda(), streamer=clock)
                self.wrong += found != self._expected
        except _TextOver:
            pass


def writing_model(way: str) -> tuple[torch.nn.Module, list[Text]]:
    """The model on the GPU, and the texts that torch alone writes with it."""
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=_WORDS,
    )
    model: torch.nn.Module = LlamaForCausalLM(config)
    model.train(mode=False)
    prompts = [torch.randint(0, _WORDS, (1, 8 + 5 * number)) for number in range(_PROMPTS)]
    texts = [(prompt, _written(way, model, prompt)) for prompt in prompts]
    on_gpu = model.cuda()
    for prompt in prompts[:3]:  # all that has to be traced
        _written(way, on_gpu, prompt.cuda())
    return on_gpu, texts


def _written(way: str, model: Any, prompt: torch.Tensor, **more: Any) -> list[int]:
    how = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": _TOKENS}
    how |= {"min_new_tokens": _TOKENS}
    found: list[int] = model.generate(prompt, **how, **_WAYS[way], **more)[0].tolist()
    return found
