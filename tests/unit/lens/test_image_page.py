"""`recording.page(image=…)` without a browser: which layers it shows, and what it refuses."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

import regard
from regard.errors import ArgumentError, ArgumentTypeError, IndexOutOfRangeError, NotCapturedError
from regard.images import PatchGrid
from tests.helpers.images import draw_image
from tests.helpers.vision_models import build_qwen2_vl, build_vision_model

IMAGE = draw_image()


@pytest.fixture(scope="module")
def clip():
    model, inputs, _ = build_vision_model("CLIP")
    with torch.no_grad(), regard.watch(model) as recording:
        model(**inputs)
    return recording


def read_record(page) -> dict:
    return json.loads(re.search(r'id="record">(.*?)</script>', page.html)[1])


def test_layers_of_the_text_model_are_left_out_and_the_page_says_so(clip):
    record = read_record(clip.page(image=IMAGE, heads=[1, 3], title="CLIP & <b>"))
    assert [layer["module"].split(".")[0] for layer in record["layers"]] == ["vision_model"] * 2
    assert [layer["heads"] for layer in record["layers"]] == [[1, 3]] * 2
    assert record["tokens"] == [[[0, "class"]]]
    assert record["notes"] == [
        "2 layers are not shown: they do not read an image, or their patch grid is unknown."
    ]
    assert record["title"] == "CLIP & <b>"


def test_cross_attention_to_patches_has_queries_of_its_own():
    model, inputs, _ = build_vision_model("SigLIP")
    with torch.no_grad(), regard.watch(model) as recording:
        model(**inputs)
    record = read_record(recording.page(image=IMAGE, layers="vision_model.head.attention"))
    [layer] = record["layers"]
    assert layer["shape"] == [1, 16] and layer["first"] is None
    assert record["tokens"][layer["queries"]] == [[0, "query 0"]] and record["tokens"][layer["others"]] == []


def test_a_grid_that_the_caller_states(clip):
    grid = PatchGrid(2, 3, before=1)  # of the text model, for this test
    record = read_record(clip.page([f"t{i}" for i in range(7)], image=IMAGE, grid=grid))
    assert [layer["module"].split(".")[0] for layer in record["layers"]] == ["text_model"] * 2
    assert record["tokens"] == [[[0, "t0"]]]
    with pytest.raises(
        ArgumentError, match=r"a grid of 10 tokens \(3 × 3 patches, 1 token before\) for layers of 7 or 17"
    ):
        clip.page(image=IMAGE, grid=PatchGrid(3, 3, before=1))
    with pytest.raises(ArgumentTypeError, match="grid as a tuple"):
        clip.page(image=IMAGE, grid=[(3, 3)])


def test_wrong_arguments_are_refused(clip):
    with pytest.raises(NotCapturedError, match="not part of a model whose patch grid is known"):
        clip.page(image=IMAGE, layers="text_model*")
    with pytest.raises(ArgumentError, match="2 images for batch entry 0, which has 1"):
        clip.page(image=[IMAGE, IMAGE])
    with pytest.raises(ArgumentError, match="an empty list of images"):
        clip.page(image=[])
    with pytest.raises(IndexOutOfRangeError, match="2 batch entries"):
        clip.page(image=IMAGE, batch=2)
    with pytest.raises(IndexOutOfRangeError, match="numbers from 0 to 3"):
        clip.page(image=IMAGE, heads=[4])
    with pytest.raises(ArgumentError, match="5 tokens"):
        clip.page(list("abcde"), image=IMAGE)
    with pytest.raises(ArgumentError, match=r"one map of each head, [0-9,]+ bytes"):
        clip.page(image=IMAGE, max_bytes=50_000)
    with pytest.raises(ArgumentError, match="cannot be read"):
        clip.page(image="gone.png")


def test_a_batch_entry_without_an_image():
    model, inputs, layer = build_qwen2_vl()
    length = inputs["input_ids"].shape[1]
    first, patches = inputs["input_ids"][:1], int(inputs["image_grid_thw"][0].prod())
    inputs |= {
        "input_ids": torch.cat([first, torch.full((1, length), 7)]),
        "attention_mask": torch.ones(2, length, dtype=torch.long),
        "pixel_values": inputs["pixel_values"][:patches],
        "image_grid_thw": inputs["image_grid_thw"][:1],
    }
    inputs["mm_token_type_ids"] = (inputs["input_ids"] == 90).long()
    with torch.no_grad(), regard.watch(model) as recording:
        model(**inputs)
    assert recording.grids(layer, batch=1) == []
    assert len(recording.grids(layer)) == len(recording.grids("model.visual.blocks.0.attn")) == 1
    with pytest.raises(ArgumentError, match="batch entry 1, which has none"):
        recording.page(image=IMAGE, batch=1)


def test_stored_rows_are_the_weights():
    model, inputs, layer = build_vision_model("ViT")
    with torch.no_grad(), regard.watch(model) as recording:
        model(**inputs)
    from regard.lens.picture_page import ROUNDING, _build_layers, _encode_rows, _find_recorded

    calls = [entry for entry in recording._layer_calls() if entry.module == layer]
    [shown] = _build_layers(
        _find_recorded(calls, recording._module_hints.image_passes, 1, []), None, None, [2, 0]
    )
    record = _encode_rows(shown, 6)
    assert record["queries"][0] == 0 and len(set(record["queries"])) == 6
    import base64
    import zlib

    levels = np.frombuffer(zlib.decompress(base64.b64decode(record["levels"].text)), np.uint8)
    decoded = record["floor"] * (record["top"] / record["floor"]) ** ((levels.reshape(2, 6, 25) - 2.0) / 253)
    expected = recording[layer][1, [2, 0]].to_dense().numpy()[:, record["queries"]]
    np.testing.assert_allclose(decoded, expected, rtol=1.01 * ROUNDING)
