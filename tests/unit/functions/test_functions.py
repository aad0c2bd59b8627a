"""The example functions, run by the runtime's own loader, on the CPU."""

import base64
import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torchvision.models import resnet18  # type: ignore[import-untyped]  # it ships no types

from gateway_ext.runtime import handler_module
from gateway_ext.runtime.handler_values import HandlerContext, HandlerEvent, Headers
from tests.kit.places import ROOT

FUNCTIONS = ROOT / "functions"
Handle = Callable[..., Any]
Load = Callable[[str], Handle]


def event_of(body: object = b"", kind: str = "application/json") -> HandlerEvent:
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    return HandlerEvent("POST", "/", Headers([("Content-Type", kind)]), sent)


@pytest.fixture
def load() -> Iterator[Load]:
    """Loads one function at a time: each is the package `function` in its process."""
    path, modules = list(sys.path), set(sys.modules)

    def forget() -> None:
        for name in set(sys.modules) - modules:
            if name == "handler" or name.split(".")[0] == "function":
                del sys.modules[name]

    def load(name: str) -> Handle:
        forget()
        handle = handler_module.load(FUNCTIONS / name)

        def call(body: object = b"", kind: str = "application/json") -> Any:
            return handle(event_of(body, kind), HandlerContext("here"))

        return call

    yield load
    forget()
    sys.path[:] = path


def test_hello_greets_whoever_is_named(load: Load) -> None:
    hello = load("hello")
    assert hello({"name": "Ada"})["body"] == {"hello": "Ada", "from": "here"}
    assert hello(b"Bob")["body"]["hello"] == "Bob"
    assert hello(b"")["body"]["hello"] == "world"
    assert hello([1])["body"]["hello"] == "[1]"


def test_classify_takes_bytes_base64_and_pixels(load: Load) -> None:
    classify = load("classify")
    picture = io.BytesIO()
    Image.new("RGB", (300, 260), (200, 30, 90)).save(picture, "PNG")
    direct = classify(picture.getvalue(), "image/png")
    assert direct["statusCode"] == 200
    classes = direct["body"]["classes"]
    assert [set(one) for one in classes] == [{"class", "chance"}] * 5
    chances = [one["chance"] for one in classes]
    assert chances == sorted(chances, reverse=True)
    coded = base64.b64encode(picture.getvalue()).decode()
    assert classify({"image": coded}) == direct
    assert classify({"pixels": torch.rand(3, 32, 40).tolist()})["statusCode"] == 200


@pytest.mark.parametrize("body", [b"", b"{}", b'{"image": "!"}', b'{"pixels": [[1]]}', b"[1]"])
def test_classify_says_400_when_there_is_no_image(load: Load, body: bytes) -> None:
    assert load("classify")(body)["statusCode"] == 400


def test_classify_answers_a_list_as_its_calls_alone(load: Load) -> None:
    classify = load("classify")
    pixels = [torch.rand(3, 32, 40).tolist() for _ in range(2)]
    sent = [{"pixels": pixels[0]}, b"no image", {"pixels": pixels[1]}]
    together = sys.modules["function.handler"].handle_batch(
        [event_of(each) for each in sent], HandlerContext("here")
    )
    assert [each["statusCode"] for each in together] == [200, 400, 200]
    for found, body in zip(together, sent, strict=True):
        alone = classify(body)
        assert alone["statusCode"] == found["statusCode"]
        if found["statusCode"] == 200:
            numbers = [[one["class"] for one in each["body"]["classes"]] for each in (found, alone)]
            assert numbers[0] == numbers[1]


def test_classify_uses_the_weights_that_are_named(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(7)
    torch.save(resnet18().state_dict(), tmp_path / "weights")
    pixels = {"pixels": torch.rand(3, 64, 64).tolist()}
    random = load("classify")(pixels)
    monkeypatch.setenv("WEIGHTS", str(tmp_path / "weights"))
    assert load("classify")(pixels) != random


def test_generate_streams_the_same_tokens_for_the_same_seed(load: Load) -> None:
    generate = load("generate")
    wish = {"prompt": "Once upon", "tokens": 5, "seed": 3}
    answer = generate(wish)
    assert answer["headers"]["Content-Type"] == "text/event-stream"
    events = list(answer["body"])
    assert len(events) == 6
    assert all(event.startswith("data: ") and event.endswith("\n\n") for event in events)
    assert events[-1] == "data: [DONE]\n\n"
    assert list(generate(wish)["body"]) == events
    assert list(generate(wish | {"seed": 4})["body"]) != events
    assert len(list(generate(b"plain text")["body"])) == 33


def test_generate_computes_with_its_cache_what_it_does_without(load: Load) -> None:
    load("generate")
    model = sys.modules["function.handler"].model
    tokens = torch.randint(0, 256, (1, 12))
    with torch.no_grad():
        whole, _ = model(tokens, torch.arange(12), model.empty_cache("cpu"))
        cache, step = model.empty_cache("cpu"), None
        for place in range(12):
            step, cache = model(tokens[:, place : place + 1], torch.tensor([place]), cache)
    torch.testing.assert_close(step, whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "wish", [{"tokens": 0}, {"tokens": 1000}, {"temperature": 0}, {"seed": "x"}]
)
def test_generate_says_400_when_a_wish_makes_no_sense(load: Load, wish: dict[str, object]) -> None:
    assert load("generate")(wish)["statusCode"] == 400


def test_pipeline_finds_boxes_and_names_what_is_in_them(load: Load) -> None:
    pipeline = load("pipeline")
    answer = pipeline({"seed": 1, "boxes": 4})
    assert answer["statusCode"] == 200
    found = answer["body"]["found"]
    assert len(found) == 4
    for one in found:
        left, top, right, bottom = one["box"]
        assert 0 <= left <= right <= 1
        assert 0 <= top <= bottom <= 1
        assert 0 <= one["class"] < 10
    assert pipeline({"seed": 1, "boxes": 4}) == answer
    assert pipeline({"pixels": torch.rand(3, 50, 70).tolist()})["statusCode"] == 200
    assert pipeline(b"")["statusCode"] == 200


@pytest.mark.parametrize("body", [b"{", {"boxes": 0}, {"pixels": 1}, [1]])
def test_pipeline_says_400_when_a_wish_makes_no_sense(load: Load, body: object) -> None:
    assert load("pipeline")(body)["statusCode"] == 400
