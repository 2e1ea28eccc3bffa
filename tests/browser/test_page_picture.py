"""The page of attention over images in a real browser: every number on it is a weight of the recording."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.nightly import keep_in_ci
from tests.helpers.pages import HOSTILE, PIXELS, faults

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

import regard
from regard.images import PatchGrid
from tests.helpers.images import draw_image
from tests.helpers.vision_models import build_qwen2_vl, build_vision_model, to_pixel_values

pytestmark = pytest.mark.slow  # starts a browser
RAMP = np.array([[0, 0, 4], [87, 16, 110], [188, 55, 84], [249, 142, 9], [252, 255, 164]], float)
HALVES = {"rtol": 0.01}  # what the page stores in half precision; it states its own bound, which is smaller


def record(model, inputs):
    with torch.no_grad(), regard.watch(model) as recording:
        model(**inputs)
    return recording


def wait(tab, state: str) -> None:
    """Wait until all maps of a state, layer.head.query, are drawn."""
    tab.locator(f'#app[data-ready="{state}"]').wait_for()


def listed_weights(tab) -> dict[int, float]:
    """Return the list of the largest weights, by key."""
    items = tab.locator(".largest li").evaluate_all(
        "items => items.map(i => [Number(i.dataset.key), Number(i.querySelector('.weight').dataset.weight)])"
    )
    return {int(key): weight for key, weight in items}


def pointed_weight(tab) -> float:
    return float(tab.locator("#patch-status .weight").get_attribute("data-weight"))


@pytest.mark.parametrize(("width", "scheme"), keep_in_ci([(1280, "light"), (390, "dark")], (390, "dark")))
def test_a_vision_model_with_registers(show, width, scheme):
    model, inputs, layer = build_vision_model("DINOv2")
    recording = record(model, inputs)
    weights = recording[layer.replace("0", "1")][1].to_dense().numpy()  # the last layer
    [grid] = recording.grids(layer, batch=1)
    page = recording.page(image=draw_image(64, 96)[::-1], batch=1)
    tab = show(page, viewport={"width": width, "height": 900}, color_scheme=scheme)

    # The class token is the first query, and the mean of the heads the first map.
    wait(tab, "1.mean.0")
    mean = weights.mean(0)
    assert tab.locator("#query b").text_content() == "class"
    np.testing.assert_allclose(list(listed_weights(tab).values()), np.sort(mean[0])[::-1][:8], **HALVES)
    tokens = tab.locator(".token-button").evaluate_all("nodes => nodes.map(n => Number(n.dataset.weight))")
    np.testing.assert_allclose(tokens, mean[0, :5], **HALVES)
    assert tab.locator(".token-button bdi").all_text_contents() == list(grid.names)
    sums = tab.locator("#sums .weight").evaluate_all("nodes => nodes.map(n => Number(n.dataset.weight))")
    np.testing.assert_allclose(sums, [mean[0, 5:].sum(), mean[0, :5].sum()], **HALVES)

    # A click chooses a patch as query; the keyboard reaches every patch of the map.
    canvas = tab.locator("canvas.picture")
    box = canvas.bounding_box()
    canvas.click(position={"x": box["width"] * 4.5 / 6, "y": box["height"] * 1.5 / 4})
    query = int(grid.positions[1, 4])
    wait(tab, f"1.mean.{query}")
    tab.locator("#head").select_option("2")
    wait(tab, f"1.2.{query}")
    canvas.focus()
    tab.keyboard.press("Home")
    found = []
    for row in range(4):
        steps = ["ArrowRight"] * 5 if row % 2 == 0 else ["ArrowLeft"] * 5
        line = [pointed_weight(tab)]
        for key in steps:
            tab.keyboard.press(key)
            line.append(pointed_weight(tab))
        found.append(line if row % 2 == 0 else line[::-1])
        tab.keyboard.press("ArrowDown")
    np.testing.assert_allclose(found, grid.to_map(weights[2, query]), **HALVES)

    # Enter chooses the patch under the cursor; the maps of all heads follow.
    tab.keyboard.press("Home")
    tab.keyboard.press("Enter")
    wait(tab, "1.2.5")
    tops = tab.locator("#head-maps span").evaluate_all("nodes => nodes.map(n => Number(n.dataset.top))")
    expected = [row[5, 5:].max() for row in (mean, *weights)]
    np.testing.assert_allclose(tops, expected, **HALVES)
    tab.locator('#head-maps button[data-head="0"]').click()
    wait(tab, "1.0.5")
    tab.locator(".token-button").nth(3).click()
    wait(tab, "1.0.3")
    np.testing.assert_allclose(list(listed_weights(tab).values()), np.sort(weights[0, 3])[::-1][:8], **HALVES)
    assert faults(tab) == []
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_colours_of_the_map_and_its_opacity(show):
    model, inputs, layer = build_vision_model("SigLIP")
    recording = record(model, inputs)
    [grid] = recording.grids(layer)
    tab = show(recording.page(image=draw_image(64, 64), layers=layer))
    start = int(grid.positions[2, 2])  # there is no other token to start from
    wait(tab, f"0.mean.{start}")
    weights = grid.to_map(recording[layer][0].to_dense().numpy().mean(0)[start])
    canvas = tab.locator("canvas.picture")

    def read_centres() -> np.ndarray:
        tab.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        script = f"""(canvas, [rows, columns]) => {{ {PIXELS}
          return Array.from({{ length: rows * columns }}, (_, n) => {{
            const y = Math.floor(((Math.floor(n / columns) + 0.5) * height) / rows);
            const x = Math.floor((((n % columns) + 0.5) * width) / columns);
            return Array.from(data.slice(4 * (y * width + x), 4 * (y * width + x) + 3)); }}); }}"""
        return np.reshape(canvas.evaluate(script, [grid.rows, grid.columns]), (grid.rows, grid.columns, 3))

    tab.locator("#opacity").fill("10")
    place = weights / weights.max() * 4
    low = np.minimum(place.astype(int), 3)
    expected = RAMP[low] + (place - low)[..., None] * (RAMP[low + 1] - RAMP[low])
    np.testing.assert_allclose(read_centres(), expected, atol=3)
    tab.locator("#opacity").fill("0")
    tab.locator("#grey").uncheck()
    np.testing.assert_allclose(read_centres(), draw_image(64, 64)[8::16, 8::16], atol=12)  # scaled


@pytest.mark.parametrize("width", keep_in_ci([1280, 390], 390))
def test_a_text_with_two_images_and_hostile_names(show, width, tmp_path):
    from PIL import Image

    model, inputs, layer = build_qwen2_vl()
    # Both images in one text.
    ids = torch.cat(
        [row[mask.bool()] for row, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)]
    )
    inputs |= {"input_ids": ids[None], "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
    inputs["mm_token_type_ids"] = (inputs["input_ids"] == 90).long()
    recording = record(model, inputs)
    path = tmp_path / "<img src=x onerror=alert(1)>.png"
    Image.fromarray(draw_image(32, 64)).save(path)
    tokens = [(HOSTILE * 4)[i] for i in range(len(ids))]
    page = recording.page(tokens, image=[path, draw_image(48, 32)], title=HOSTILE[0])
    tab = show(page, viewport={"width": width, "height": 900})
    last = len(ids) - 1
    wait(tab, f"5.mean.{last}")  # two vision layers for each image, then two of the language model
    assert tab.locator("h1").text_content() == HOSTILE[0]
    assert tab.locator("figcaption").all_text_contents() == ["<img src=x onerror=alert(1)>.png", "image 1"]
    weights = recording[layer.replace("0", "1")][0].to_dense().numpy()
    first, second = recording.grids(layer)
    sums = tab.locator("#sums .weight").evaluate_all("nodes => nodes.map(n => Number(n.dataset.weight))")
    mean = weights.mean(0)[last]
    np.testing.assert_allclose(sums[:2], [grid.to_map(mean).sum() for grid in (first, second)], **HALVES)
    assert tab.locator(".token-button").count() == len(ids) - first.num_patches - second.num_patches

    # A patch of the second image attends to the first one, and to no later token.
    canvas = tab.locator("canvas.picture").nth(1)
    canvas.focus()
    tab.keyboard.press("End")
    tab.keyboard.press("Enter")
    query = int(second.positions[-1, -1])
    wait(tab, f"5.mean.{query}")
    assert "image 1, row 2, column 1" in tab.locator("#query").text_content()
    later = tab.locator(f'.token-button[data-token="{last}"]').get_attribute("data-weight")
    assert float(later) == weights[:, query, last].max() == 0

    # A layer of the vision model reads one image, in blocks of patches.
    tab.locator("#layer").select_option(index=1)
    [grid] = recording.grids("model.visual.blocks.0.attn")[1:]
    matrix = recording.calls("model.visual.blocks.0.attn")[1].matrix[0].to_dense().mean(0)
    wait(tab, f"1.mean.{grid.positions[4, 2]}")
    assert tab.locator("canvas.picture:visible").count() == 1
    tab.locator("canvas.picture:visible").focus()
    tab.keyboard.press("Home")
    tab.keyboard.press("ArrowDown")
    assert pointed_weight(tab) == pytest.approx(
        float(matrix[grid.positions[4, 2], grid.positions[1, 0]]), rel=0.01
    )
    assert faults(tab) == []
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.nightly
def test_rows_are_stored_if_not_all_weights_fit(show):
    model, inputs, layer = build_vision_model("ViT")
    recording = record(model, inputs)
    page = recording.page(image=draw_image(32, 48), max_bytes=106_000)
    assert len(page.html.encode()) <= 106_000
    tab = show(page)
    wait(tab, "1.mean.0")
    assert "3.7 %" in tab.locator("footer").text_content()
    weights = recording[layer][0].to_dense().numpy()
    tab.locator("#layer").select_option(index=0)
    wait(tab, "0.mean.0")
    np.testing.assert_allclose(
        list(listed_weights(tab).values()), np.sort(weights.mean(0)[0])[::-1][:8], rtol=0.038
    )
    # A patch without a map leads to the nearest one that has it.
    canvas = tab.locator("canvas.picture")
    canvas.focus()
    stored = []
    for query in range(1, 25):
        tab.evaluate(f"location.hash = 'layer=0&head=3&query={query}'")
        wait(tab, f"0.3.{query}")
        stored.append(int(tab.locator("#app").get_attribute("data-query")) == query)
        note = tab.locator("#patch-status").text_content()
        assert ("nearest stored one" in note) != stored[-1]
    assert 0 < sum(stored) < 24


@pytest.mark.nightly
def test_four_thousand_image_tokens(show):
    import transformers as hf

    config = hf.Dinov2WithRegistersConfig(
        hidden_size=128, num_hidden_layers=4, num_attention_heads=2, intermediate_size=8, image_size=512, patch_size=8,
        num_register_tokens=4,
    )  # fmt: skip
    torch.manual_seed(0)
    model = hf.Dinov2WithRegistersModel(config).eval()
    image = draw_image(512, 512)
    noise = np.random.default_rng(0).normal(0, 12, image.shape)
    image = np.clip(image + noise, 0, 255).astype(np.uint8)  # as hard to compress as a photograph
    recording = record(model, {"pixel_values": to_pixel_values(image)})
    page = recording.page(image=image)
    assert 5_000_000 < len(page.html.encode()) <= 10_000_000
    tab = show(page)
    wait(tab, "3.mean.0")
    layer = "encoder.layer.3.attention"
    [grid] = recording.grids(layer)
    assert grid == PatchGrid(64, 64, before=5, names=("class", *(f"register {i}" for i in range(1, 5))))
    weights = recording[layer][0, :, 0].numpy().mean(0)
    np.testing.assert_allclose(list(listed_weights(tab).values()), np.sort(weights)[::-1][:8], rtol=0.038)
