"""`regard.look`: the page of a run on a text, on inputs, or of a model that generates."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import regard  # noqa: E402
from regard import ArgumentError, ArgumentTypeError  # noqa: E402
from tests.helpers.tiny_models import TINY  # noqa: E402

TEXT = "a cat"
IDS = torch.tensor([[3, 4, 5]])


class Letters:
    """A tokenizer of letters."""

    def encode(self, text):
        return [ord(letter) % 60 for letter in text]

    def decode(self, ids):
        return "".join(chr(96 + i) for i in ids)


def read_record(page) -> dict:
    return json.loads(re.search(r'id="record">(.*?)</script>', page.html)[1])


def record_run(model, **inputs):
    with torch.no_grad(), regard.watch(model) as recording:
        model(**inputs)
    return recording


def test_a_module_and_its_tokenizer():
    model, letters = TINY["Llama"].build(), Letters()
    ids = torch.tensor([letters.encode(TEXT)])
    found = regard.look(model, TEXT, tokenizer=letters, title="A look")
    names = [letters.decode([i]) for i in ids[0].tolist()]
    assert found.html == record_run(model, input_ids=ids).page(names, title="A look").html
    first = next(iter(record_run(model, input_ids=ids)))
    part = regard.look(model, TEXT, tokenizer=letters, layers=first, max_tokens=3)
    record = read_record(part)
    assert [layer["module"] for layer in record["layers"]] == [first] and record["layers"][0]["shape"] == [
        3,
        3,
    ]
    assert record["title"] == f"{type(model).__name__} on 3 tokens"


def test_a_text_that_is_longer_than_the_model_reads_warns():
    letters = Letters()
    letters.model_max_length = 2
    with pytest.warns(UserWarning, match="5 tokens, and the model reads the first 2"):
        regard.look(TINY["Llama"].build(), TEXT, tokenizer=letters)


def test_inputs_are_on_the_device_of_the_model(monkeypatch):
    seen = []

    def stop(inputs, _):
        seen.append(inputs)
        raise InterruptedError("a model without numbers does not run")

    monkeypatch.setattr("regard.lens.look_page.run_inputs", stop)
    for name in ("Llama", "T5"):
        with pytest.raises(InterruptedError):
            regard.look(TINY[name].build().to("meta"), TEXT, tokenizer=Letters())
    for inputs in seen:
        tensors = [inputs.text.ids, *inputs.arguments.values()]
        tensors += [] if inputs.decoder_ids is None else [inputs.decoder_ids]
        assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert seen[1].is_encoder_decoder


def test_generated_tokens_are_part_of_the_page():
    model = TINY["Llama"].build()
    model.generation_config.eos_token_id = None
    record = read_record(regard.look(model, TEXT, tokenizer=Letters(), generate=4))
    assert {tuple(layer["shape"]) for layer in record["layers"]} == {(8, 8)}
    assert [len(text) for text in record["texts"]] == [8]


@pytest.mark.parametrize("as_mapping", [True, False])
def test_inputs_of_the_model(as_mapping):
    model, ids = TINY["Llama"].build(), torch.arange(3, 14).reshape(1, 11)
    found = regard.look(model, inputs={"input_ids": ids} if as_mapping else ids, title="A look")
    assert found.html == record_run(model, input_ids=ids).page(title="A look").html
    named = read_record(regard.look(model, inputs={"input_ids": ids}, tokenizer=Letters()))
    assert named["texts"] == [[Letters().decode([i]) for i in range(3, 14)]]


def test_inputs_of_an_encoder_and_a_decoder():
    model = TINY["T5"].build()
    inputs = {"input_ids": torch.arange(1, 6)[None], "decoder_input_ids": torch.arange(7, 10)[None]}
    record = read_record(regard.look(model, inputs=inputs, tokenizer=Letters()))
    cross = next(layer for layer in record["layers"] if "EncDec" in layer["module"])
    assert record["texts"][cross["query_text"]] == list("ghi") and record["texts"][cross["key_text"]] == list(
        "abcde"
    )


def test_ids_without_a_batch_have_tokens():
    layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True)
    model = torch.nn.Sequential(torch.nn.Embedding(9, 8), layer).eval()
    pages = [regard.look(model, inputs=ids, tokenizer=Letters()) for ids in (IDS[0], IDS)]
    assert read_record(pages[0])["texts"] == read_record(pages[1])["texts"] == [list("cde")]


def test_errors_of_the_model_itself_are_raised_unchanged():
    class Broken(torch.nn.Module):
        def forward(self, x):
            return x + "a"

    with pytest.raises(TypeError) as refusal:
        regard.look(Broken(), inputs=IDS)
    assert not isinstance(refusal.value, regard.RegardError)


def test_wrong_calls_say_what_to_pass():
    model = TINY["Llama"].build()
    layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    for call, error, match in [
        (lambda: regard.look(model), ArgumentError, "no text, image, audio or inputs"),
        (
            lambda: regard.look(model, TEXT, inputs=torch.ones(1, 3)),
            ArgumentError,
            "inputs together with a text",
        ),
        (lambda: regard.look(model, torch.ones(1, 3)), ArgumentTypeError, "inputs=inputs"),
        (lambda: regard.look(3, TEXT), ArgumentTypeError, "a name, a folder, or a torch.nn.Module"),
        (lambda: regard.look(np.zeros(3), TEXT), ArgumentTypeError, "model as an array"),
        (lambda: regard.look(np.zeros(3)), ArgumentError, "no text, image, audio or inputs"),
        (lambda: regard.look(model, inputs=IDS, generate=3), ArgumentError, "inputs with generate"),
        (lambda: regard.look(model, inputs=IDS, max_tokens=2), ArgumentError, "inputs with max_tokens"),
        (lambda: regard.look(model, inputs=IDS.tolist()), ArgumentTypeError, "inputs as a list"),
        (lambda: regard.look(model, inputs=(IDS,)), ArgumentTypeError, "inputs as a tuple"),
        (lambda: regard.look(model, inputs=TEXT), ArgumentTypeError, "inputs as str"),
        (lambda: regard.look(layer, inputs={"ids": IDS}), ArgumentTypeError, "'ids'|'src'"),
        (lambda: regard.look(layer, inputs={0: IDS}), ArgumentTypeError, "src, src_mask"),
        (
            lambda: regard.look(model, TEXT, audio="a.wav", generate=3),
            ArgumentError,
            "a transcript of the audio",
        ),
    ]:
        with pytest.raises(error, match=match):
            call()
