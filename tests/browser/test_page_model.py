"""`recording.page` in a real browser: what is on screen is compared with the lens in Python."""

from __future__ import annotations

import base64
import json
import re
import statistics
import time
import zlib
from types import SimpleNamespace

import numpy as np
import pytest

from tests.helpers.pages import HOSTILE, SCREENS, faults

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import regard  # noqa: E402
from regard import ArgumentError, ArgumentTypeError, IndexOutOfRangeError  # noqa: E402
from regard.cli import main  # noqa: E402
from regard.lens import model_page  # noqa: E402
from regard.models.loading import DEMO_TEXT  # noqa: E402
from regard.render.text import escape_unprintable  # noqa: E402
from tests.helpers.story_model import load_numpy, load_torch  # noqa: E402
from tests.helpers.tiny_models import TINY  # noqa: E402

CAT = "The cat sat on the mat because it was tired."


def watched(model, **inputs):
    with torch.no_grad(), regard.watch(model) as recording:
        model(**inputs)
    return recording


@pytest.fixture(scope="module")
def cat(minilm):
    """The sentence through MiniLM: the recording, its tokens, and the page."""
    model, tokenizer = minilm
    inputs = tokenizer(CAT, return_tensors="pt")
    tokens = tokenizer.convert_ids_to_tokens(inputs["input_ids"][0])
    recording = watched(model, **inputs)
    return recording, tokens, recording.page(tokens, title="MiniLM")


@pytest.fixture(scope="module")
def whole(minilm):
    """512 tokens through MiniLM: recording, tokens, page, and the seconds of the model and of the page."""
    model, tokenizer = minilm
    text = " ".join([CAT, "A dog was at the door, and it barked; nobody came to open."] * 60)
    inputs = tokenizer(text, return_tensors="pt", truncation=True, max_length=512)
    tokens = tokenizer.convert_ids_to_tokens(inputs["input_ids"][0])
    watched(model, **inputs)
    times = [time.perf_counter()]
    for _ in range(3):
        recording = watched(model, **inputs)
        times.append(time.perf_counter())
    page = recording.page(tokens)
    making = time.perf_counter() - times[-1]
    return recording, tokens, page, statistics.median(np.diff(times)), making


def stated(page) -> dict[str, float]:
    """Return the error that the page states."""
    return record(page)["error"]


def record(page) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="record">(.*?)</script>', page.html)[1])


def hits(tab) -> list[dict]:
    """Return all results of the search on screen."""
    tab.locator("#results[data-ready]").wait_for(state="attached")
    if tab.locator("#all-results").count():
        tab.locator("#all-results").click()
    return tab.locator(".hit").evaluate_all(
        "nodes => nodes.map(n => ({head: n.dataset.head, weight: Number(n.querySelector('.much').dataset.weight),"
        " pair: [...n.querySelectorAll('sub')].map(s => Number(s.textContent)), text: n.textContent}))"
    )


def look(tab, query, key) -> list[dict]:
    """Search, and return the results."""
    tab.get_by_label("Query token").fill(str(query))
    tab.get_by_label("Key token").fill(str(key))
    tab.get_by_role("button", name="Find").click()
    return hits(tab)


def settled(tab) -> str:
    """Return the fragment, once it has not changed for half a second."""
    return tab.evaluate(
        """async () => { for (let last = null; last !== location.hash;) {
        last = location.hash; await new Promise((done) => setTimeout(done, 500)); } return location.hash; }"""
    )


def weight(tab) -> str:
    """Return the weight beside the map, once it is computed."""
    shown = tab.locator(".cell-card .weight").filter(has_not_text="…")
    shown.wait_for()
    return shown.text_content()


def head_key(row) -> str:
    return f"{row['layer']}.{row['call']}.{row['head']}"


def tolerance(value: float, error: dict) -> float:
    """Return the tolerance of a weight on screen."""
    return min(error["absolute"], error["relative"] * value) + 1e-6


def check_hits(found, table, error) -> None:
    """Check that every head of the table is on screen, with its weight, in descending order."""
    wanted = {head_key(row): row for row in table}
    assert {hit["head"] for hit in found} == wanted.keys()
    weights = [hit["weight"] for hit in found]
    assert weights == sorted(weights, reverse=True)
    for hit in found:
        row = wanted[hit["head"]]
        assert abs(hit["weight"] - row["weight"]) <= tolerance(row["weight"], error)


# -- The file ---------------------------------------------------------------------------------------------


def test_a_page_of_512_tokens_is_small_and_fast_to_make(whole):
    _, tokens, page, forward, making = whole
    assert len(tokens) == 512
    assert len(page.html.encode()) <= 7_000_000
    assert making <= 100 * forward
    print(f"{len(page.html) / 1e6:.2f} MB, made in {making:.2f} s, the model took {forward:.2f} s")


def test_a_saved_recording_gives_the_same_page(cat, tmp_path):
    recording, tokens, page = cat
    recording.save(tmp_path / "recording")
    assert regard.load_recording(tmp_path / "recording").page(tokens, title="MiniLM").html == page.html


def test_the_title_of_the_page():
    model = TINY["BERT"].build()
    recording = watched(model, **TINY["BERT"].inputs("none"))
    assert re.match(r'<page "All attention heads", \d+ kB', repr(recording.page()))
    assert "<title>a &lt;b&gt;</title>" in recording.page(title="a <b>").html


def test_max_bytes_limits_the_payloads():
    inputs = TINY["Llama"].inputs("none", batch=1)
    recording = watched(TINY["Llama"].build(), **inputs)
    layers = record(recording.page())["layers"]
    assert [layer["payload"]["heads"] for layer in layers] == [[0, 1, 2, 3]] * 2
    most = len(recording.page().html) - 600
    page = recording.page(max_bytes=most)
    assert len(page.html) <= most
    first, second = record(page)["layers"]
    assert first["payload"]["heads"] == [0, 1, 2, 3] and 0 < len(second["payload"]["heads"]) < 4
    none = record(recording.page(max_bytes=1))
    assert [layer["payload"] for layer in none["layers"]] == [None, None] and none["error"] is None
    few = record(recording.page(layers="*.1.*", heads=[3, 1]))["layers"]
    assert [(layer["layer"], layer["heads"], layer["payload"]["heads"]) for layer in few] == [
        (1, [3, 1], [3, 1])
    ]


def test_maps_are_maxima_and_means_of_blocks(monkeypatch):
    recording = watched(TINY["BERT"].build(), **TINY["BERT"].inputs("none", batch=1))
    A = recording[next(iter(recording))].to_dense()[0].double().numpy()
    monkeypatch.setattr(model_page, "THUMBNAIL_CELLS", 4)
    monkeypatch.setattr(model_page, "OVERVIEW_CELLS", 8)
    for long in (1024, 5):  # 11 tokens are short, then long
        monkeypatch.setattr(model_page, "LONG_TEXT", long)
        (layer, *_) = model_page.build_page_layers(recording._layer_calls(), None, None, None, 0)
        size = layer.means.shape[-1]
        assert size == (4 if long > 11 else 8)
        np.testing.assert_allclose(layer.means, blocks(A, size, np.mean), rtol=1e-5)
        np.testing.assert_allclose(layer.maxima, blocks(A, size, np.max), rtol=1e-5)
        thumbnails = model_page._thumbnails(layer)
        assert thumbnails["size"] == (4, 4) and thumbnails["block"] == [11 / 4, 11 / 4]
        for name, reduce in {"mean": np.mean, "max": np.max}.items():
            own = blocks(A, 4, reduce)
            array, floor, top = (thumbnails[name][part] for part in ("levels", "floor", "top"))
            levels = np.frombuffer(zlib.decompress(base64.b64decode(array.text)), np.uint8).reshape(own.shape)
            np.testing.assert_allclose(floor * (top / floor) ** ((levels - 2.0) / 253), own, rtol=0.04)
            assert top == pytest.approx(own.max(), rel=1e-5)


def blocks(A, cells, reduce):
    which = np.arange(A.shape[-1]) * cells // A.shape[-1]
    return np.array(
        [
            [[reduce(head[which == i][:, which == j]) for j in range(cells)] for i in range(cells)]
            for head in A
        ]
    )


def test_wrong_arguments_are_refused_with_a_hint():
    model, inputs = TINY["BERT"].build(), TINY["BERT"].inputs("none")
    recording = watched(model, **inputs)
    with pytest.raises(
        IndexOutOfRangeError, match=r"recording\.page: received batch=2; expected one of 2 batch entries"
    ):
        recording.page(batch=2)
    with pytest.raises(
        ArgumentError, match=r"layers='decoder\.\*', which matches none of .* list\(recording\)"
    ):
        recording.page(layers="decoder.*")
    with pytest.raises(IndexOutOfRangeError, match=r"heads=\[9\]; expected numbers from 0 to 3"):
        recording.page(heads=[9])
    with pytest.raises(ArgumentError, match=r"recording\.page: received 3 tokens .* each key of a layer: 11"):
        recording.page(["a", "b", "c"], findings=recording.diagnose())
    with pytest.raises(ArgumentTypeError, match=r"recording\.page: received tokens as .* a list of tokens"):
        recording.page("text", findings=recording.diagnose())
    with torch.no_grad(), regard.watch(model, measures={"e": regard.Entropy()}) as measured:
        model(**inputs)
    with pytest.raises(
        ArgumentError, match=r"recording\.page: .* recorded with measures only; .* without measures"
    ):
        measured.page()
    with pytest.warns(regard.lens.EmptyRecordingWarning), regard.watch(model) as nothing:
        pass
    with pytest.raises(ArgumentError, match=r"an empty recording.*inside the with block"):
        nothing.page()


# -- The grid ---------------------------------------------------------------------------------------------

# Selects every measure and both orders in the page itself, in one call.
ORDERS = """() => {
  const [sort, order] = ["sort", "order"].map((id) => document.getElementById(id));
  const set = (node, value) => { node.value = value; node.dispatchEvent(new Event("change")); };
  const read = () => [[...document.querySelectorAll("button.head:not(.mean)")].map((n) => n.dataset.head),
    document.querySelector("button.head:not(.mean) b").textContent];
  const both = (measure) => ["largest", "smallest"].map((way) => {
    set(sort, measure);
    set(order, way);
    return read();
  });
  return Object.fromEntries([...sort.options].map((o) => o.value).filter(Boolean).map((name) => [name, both(name)]));
}"""
GRID = "nodes => nodes.map(n => n.dataset.head)"


@pytest.mark.slow
def test_heads_are_sorted_by_every_measure(cat, show):
    recording, tokens, page = cat
    tab = show(page)
    table = recording.heads(tokens)
    heads = tab.locator("button.head:not(.mean)")
    assert heads.evaluate_all(GRID) == [head_key(row) for row in table]
    assert tab.locator(".layer").count() == 6
    assert tab.locator("#findings summary").text_content() == "Diagnosis: 1 note in 6 layers, 72 heads"
    tab.get_by_label("Sort heads by").select_option("previous")
    tab.get_by_label("Order").select_option("smallest")
    assert heads.evaluate_all(GRID) == [head_key(row) for row in table.sort("previous", largest_first=False)]
    found = tab.evaluate(ORDERS)
    assert list(found) == table.columns[4:]
    for measure, ways in found.items():
        for (order, first), largest in zip(ways, (True, False), strict=True):
            rows = table.sort(measure, largest_first=largest)
            # The page measures each layer by itself, so equal heads may be in another order.
            numbers = {head_key(row): row[measure] for row in rows}
            assert sorted(order) == sorted(numbers)
            assert [numbers[key] for key in order] == pytest.approx([row[measure] for row in rows], abs=1e-6)
            assert float(first) == pytest.approx(rows[0][measure], rel=5e-2)
    tab.get_by_label("Sort heads by").select_option("layer")
    assert heads.evaluate_all(GRID) == [head_key(row) for row in table]
    tab.get_by_text("What these numbers mean").click()  # every name on the page is explained
    explained = dict(
        zip(*(tab.locator(f"#measures-help {tag}").all_inner_texts() for tag in ("dt", "dd")), strict=True)
    )
    assert list(explained) == [name.replace("_", " ") for name in table.columns[4:]]
    assert explained["within 16"] == "the share on keys less than 16 tokens away"
    assert min(map(len, explained.values())) > 20
    options = tab.locator("#sort option").all_inner_texts()
    assert options == ["layer", *explained]


@pytest.mark.slow
def test_the_grid_is_drawn_before_the_weights_are_loaded(whole, show):
    page = whole[2]
    script = page.html.index('<script type="module" async>')
    early = [int(n) for n in re.findall(r'<script type="text/plain" id="array(\d+)">', page.html[:script])]
    queries = [
        layer["payload"]["query"][0]["numbers"]["array"]
        for layer in record(page)["layers"]
        if layer["payload"]
    ]
    assert early == [layer["thumbnails"]["max"]["levels"]["array"] for layer in record(page)["layers"]]
    assert len(queries) == 6 and not set(queries) & set(early)
    tab = show(page)
    tab.locator("button.head:not(.mean)").first.wait_for()
    paint, end = tab.evaluate(
        "() => new Promise(done => { const tell = () => { const [paint] = performance.getEntriesByName("
        "'first-contentful-paint'); const t = performance.getEntriesByType('navigation')[0];"
        " paint && t.domComplete ? done([paint.startTime, t.domComplete]) : setTimeout(tell, 20); }; tell(); })"
    )
    assert tab.locator("button.head:not(.mean)").count() == 72
    print(f"first paint after {paint:.0f} ms, all read after {end:.0f} ms")
    drawn = tab.evaluate(
        "() => { const c = document.querySelector('button.head:not(.mean) canvas');"
        " return new Set(c.getContext('2d').getImageData(0, 0, c.width, c.height).data).size; }"
    )
    assert drawn > 10


# -- The search -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_search_finds_the_cat(cat, show):
    recording, tokens, page = cat
    tab = show(page)
    tab.get_by_label("Query token").fill("it")
    tab.get_by_label("Key token").fill("cat")
    tab.keyboard.press("Enter")
    found, table = hits(tab), recording.find("it", "cat", tokens)
    check_hits(found, table, stated(page))
    assert [hit["head"] for hit in found[:20]] == [head_key(row) for row in table[:20]]
    assert found[0]["head"] == "5.0.11" and found[0]["pair"] == [8, 2] and "it8 → cat2" in found[0]["text"]
    tab.locator(".hit").first.click()
    assert tab.locator("#which").text_content() == "Layer 5, head 11"
    assert float(weight(tab)) == pytest.approx(table[0]["weight"], abs=stated(page)["absolute"] + 1e-4)
    assert tab.locator(".cell-card .pair").text_content() == "it → cat"


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "width"), SCREENS)
def test_the_page_of_regard_look_begins_with_the_heads_and_finds_the_name(scheme, width, show, tmp_path):
    path = tmp_path / "look.html"
    assert main(["look", "-o", str(path), "--no-open"]) == 0
    text, reading = path.read_text("utf-8"), load_numpy()(DEMO_TEXT)
    page = SimpleNamespace(save=lambda to: to.write_text(text, "utf-8"), html=text)
    tab = show(page, viewport={"width": width, "height": 844}, color_scheme=scheme)
    assert tab.locator("h1").text_content() == f"stories on {len(reading.tokens)} tokens"
    heads = tab.locator("button.head:not(.mean)")
    assert heads.count() == 32 and heads.nth(15).bounding_box()["y"] < 844  # two layers without scrolling
    assert tab.evaluate("document.documentElement.scrollWidth") <= width and faults(tab) == []
    (best, *_), weights = look(tab, "is", "Max"), reading.weights
    layer, _, head = map(int, best["head"].split("."))
    assert best["weight"] == pytest.approx(weights[layer, head][tuple(best["pair"])], abs=2e-3)
    assert [reading.pieces[i] for i in best["pair"]] == [" is", " Max"] and best["weight"] > 0.9


@pytest.mark.nightly
@pytest.mark.slow
def test_the_search_covers_every_pair_of_occurrences(whole, show):
    recording, tokens, page, *_ = whole
    tab = show(page)
    error = stated(page)
    for query, key in (("it", "cat"), ("It", "CAT"), ("the", "the"), (-1, 0)):
        check_hits(
            look(tab, query if isinstance(query, str) else f"#{query}", key),
            recording.find(query, key, tokens),
            error,
        )
    assert tab.locator("#search-status").text_content() == "The largest weight of each of 72 heads."


@pytest.mark.slow
def test_a_search_without_results_says_why(cat, show):
    tab = show(cat[2])
    tab.get_by_label("Query token").fill("cats")
    tab.keyboard.press("Enter")
    assert tab.locator("#search-status").text_content() == "Enter a key token too."
    tab.get_by_label("Key token").fill("it")
    tab.keyboard.press("Enter")
    tab.locator("#results[data-ready]").wait_for(state="attached")
    assert tab.locator("#search-status").text_content().startswith("No token cats. Similar: cat, ")
    assert look(tab, "#99", "it") == [] and tab.locator("#search-status").text_content().startswith(
        "No token #99"
    )
    tab.get_by_role("button", name="Clear").click()
    assert tab.locator("#search-status").text_content() == ""


# -- One head ---------------------------------------------------------------------------------------------

# Goes to many cells in the page itself, by the address, and reads the details beside the map.
READ = """async (places) => {
  const read = [];
  for (const [layer, head, query, key] of places) {
    location.hash = `layer=${layer}&head=${head}&query=${query}&key=${key}`;
    const want = `query ${query} → key ${key}`;
    const card = () => document.querySelector("#head:not([hidden]) .cell-card");
    const there = () => document.querySelector("#which").textContent === `Layer ${layer}, head ${head}`
      && card()?.querySelector(".place")?.textContent.startsWith(want)
      && card().querySelector(".weight").textContent !== "…" && card().querySelector(".weight");
    for (let n = 0; !there() && n < 6000; n++) await new Promise((done) => setTimeout(done, 10));
    if (!there()) throw new Error(`${location.hash}: ${card()?.textContent}`);
    read.push(there().textContent);
  }
  return read;
}"""


@pytest.mark.slow
def test_weights_on_screen_are_those_of_python(whole, show):
    recording, _, page, *_ = whole
    rng = np.random.default_rng(0)
    places = [[int(rng.integers(n)) for n in (6, 12, 512, 512)] for _ in range(100)]
    tab = show(page)
    shown = tab.evaluate(READ, places)
    names, error = list(recording), stated(page)
    dense = {
        layer: recording[names[layer]].to_dense()[0].double().numpy() for layer in {p[0] for p in places}
    }
    for (layer, head, i, j), text in zip(places, shown, strict=True):
        want = dense[layer][head, i, j]
        rounded = 5e-5 if want >= 9e-4 else 5e-4 * want  # to four digits
        assert abs(float(text) - want) <= tolerance(want, error) + rounded


@pytest.mark.slow
def test_a_cell_shows_how_its_weight_arose(show):
    gpt = load_numpy()
    run = gpt("Zobi and Rumo went to the park. Zobi had a kite, and gave it to")
    recording = watched(load_torch(), tokens=torch.tensor(run.tokens)[None])
    page = recording.page([piece.strip() or "⏎" for piece in run.pieces])
    tab = show(page)
    tab.goto(tab.url.split("#")[0] + "#layer=3&head=6&query=19&key=4")
    tab.reload()
    tab.locator(".cell-card .weight").wait_for()
    assert tab.locator("#weight-steps").is_hidden()
    tab.locator("canvas.map").focus()
    tab.keyboard.press("ArrowDown")
    tab.keyboard.press("Enter")
    tab.locator("#steps-score td").first.wait_for()
    read = "cells => cells.map((cell) => Number(cell.dataset.value))"
    rows = [
        np.concatenate(
            [
                table.locator(f"tbody tr:nth-child({row}) td").evaluate_all(read)
                for table in tab.locator("#steps-products table").all()
            ]
        )
        for row in (1, 2, 3)
    ]
    query, key, weights = run.query[3, 6, 20], run.key[3, 6, 4], run.weights[3, 6, 20]
    np.testing.assert_allclose(rows, [query, key, query * key], rtol=3e-3, atol=1e-3)  # halves
    total, scale, score = tab.locator("#steps-score td[data-value]").evaluate_all(read)
    assert total == pytest.approx(np.sum(rows[2]), abs=1e-9) and scale == pytest.approx(32**-0.5)
    assert score == pytest.approx(total * scale, rel=1e-6)
    shown = tab.locator("#steps-softmax tbody tr:nth-child(3) td").evaluate_all(read)
    assert max(shown) == pytest.approx(weights.max(), rel=stated(page)["relative"] + 1e-6)
    assert "not the values" in tab.locator("#steps-missing").text_content()
    tab.locator("#mean").click()
    assert tab.locator("#weight-steps").is_hidden()
    tab.locator("canvas.map").focus()
    tab.keyboard.press("ArrowUp")
    tab.keyboard.press("Enter")
    tab.locator("#weight-steps", has_text="mean over heads").wait_for()


@pytest.mark.slow
def test_lines_of_a_short_text(cat, show):
    recording, _, page = cat
    tab = show(page)
    tab.get_by_role("button", name="Layer 5, head 11").click()
    card = tab.locator(".cell-card:visible")
    assert card.text_content().startswith("Point at the map")
    tab.get_by_role("radio", name="Lines").check()
    assert card.text_content().startswith("Point at a token")
    tab.get_by_role("button", name="query 8: it").hover()
    shown = tab.locator(".side1 .end").evaluate_all(
        "nodes => nodes.map(n => n.querySelector('.value').textContent)"
    )
    want = recording[list(recording)[5]].to_dense()[0, 11, 8].double().numpy()
    for text, weight in zip(shown, want, strict=True):
        assert (text == "<0.001" and weight < 1e-3) or abs(float(text) - weight) < 5e-4 + stated(page)[
            "absolute"
        ]
    tab.get_by_role("button", name="key 2: cat").click()
    assert tab.get_by_role("button", name="key 2: cat").get_attribute("aria-pressed") == "true"
    column = recording[list(recording)[5]].to_dense()[0, 11, :, 2].double().numpy()
    shown = tab.locator(".side0 .end").evaluate_all(
        "nodes => nodes.map(n => n.querySelector('.value').textContent)"
    )
    assert [float(text) for text in shown] == pytest.approx(column, abs=5e-4 + stated(page)["absolute"])
    pixels = "c => new Set(c.getContext('2d').getImageData(0, 0, c.width, c.height).data).size"
    assert tab.locator(".between canvas").evaluate(pixels) > 3


def uniform():
    """A tiny BERT in which head 2 of layer 1 has uniform weights."""
    model = TINY["BERT"].build()
    with torch.no_grad():
        attention = model.encoder.layer[1].attention.self
        attention.query.weight[16:24] = attention.query.bias[16:24] = 0
    return watched(model, **TINY["BERT"].inputs("none", batch=1))


@pytest.mark.slow
def test_findings_are_shown_at_their_heads(show):
    recording = uniform()
    (finding,) = (finding for finding in recording.diagnose() if finding.kind == "uniform heads")
    assert (finding.layer, finding.heads) == (1, (2,))
    tab = show(recording.page())
    assert tab.locator(".sign").count() == 1
    assert tab.locator('[data-head="1.0.2"] .sign.note').count() == 1
    tab.locator("#findings summary").click()
    assert finding.message in tab.locator("#findings").text_content()
    assert finding.hint in tab.locator("#findings").text_content()
    tab.get_by_role("button", name="1.2", exact=True).click()
    assert tab.locator("#which").text_content() == "Layer 1, head 2"
    assert finding.message in tab.locator(".about-head").text_content()
    tab.get_by_role("button", name="Next head").click()
    assert tab.locator("#which").text_content() == "Layer 1, head 3"
    assert tab.locator(".about-head .finding").count() == 0


@pytest.mark.slow
def test_a_head_without_weights_says_how_to_get_them(show):
    recording = watched(TINY["Llama"].build(), **TINY["Llama"].inputs("none", batch=1))
    tab = show(recording.page(max_bytes=1))
    assert tab.locator(".head.no-weights:not(.mean)").count() == 8
    tab.get_by_role("button", name="Layer 1, head 3").click()
    assert tab.locator("#no-weights code").text_content() == (
        'recording.page(tokens, layers="model.layers.1.self_attn", heads=[3])'
    )
    look(tab, "#3", "#1")
    assert (
        tab.locator("#search-status").text_content() == "No layer with weights in this page has both tokens."
    )
    assert "no weights" in tab.locator("#error").text_content()


class Odd(regard.ScoreMod):
    def apply(self, scores, frame, q_idx, kv_idx, xp):
        return scores * 1


@pytest.mark.slow
def test_a_layer_that_a_page_cannot_compute_has_thumbnails_and_says_why(show):
    recording = watched(TINY["BERT"].build(), **TINY["BERT"].inputs("none", batch=1))
    recording.calls(list(recording)[1])[0].softcap = Odd()
    tab = show(recording.page())
    assert tab.locator(".head.no-weights:not(.mean)").evaluate_all(GRID) == [
        "1.0.0",
        "1.0.1",
        "1.0.2",
        "1.0.3",
    ]
    tab.get_by_role("button", name="Layer 1, head 2").click()
    assert "a score modification that a page supports" in tab.locator("#no-weights").text_content()
    assert len(look(tab, "#3", "#1")) == 4
    assert (
        tab.locator("#search-status").text_content()
        == "The largest weight of each of 4 heads; the weights of 4 heads are not in this page."
    )


# -- By hand, by keyboard, by address ---------------------------------------------------------------------


@pytest.mark.slow
def test_by_keyboard_alone(cat, show):
    tab = show(cat[2])
    keys = tab.keyboard
    active = "document.activeElement.getAttribute('aria-label') ?? document.activeElement.textContent"

    def tab_to(text: str) -> None:
        for _ in range(20):
            keys.press("Tab")
            if tab.evaluate(active).startswith(text):
                return
        raise AssertionError(f"no {text!r} within 20 steps")

    tab_to("Query token")
    keys.type("it")
    keys.press("Tab")
    keys.type("cat")
    keys.press("Enter")
    tab.locator(".hit").first.wait_for()
    tab_to("Layer 0, head 0")
    for key in ("ArrowDown", "ArrowDown", "ArrowRight", "End", "Home", "ArrowDown", "ArrowUp", "ArrowRight"):
        keys.press(key)
    assert tab.evaluate(active).startswith("Layer 0, head 1")
    keys.press("Enter")
    assert tab.evaluate("document.activeElement.id") == "which"
    tab_to("Map of 13 queries")
    for key in ("ArrowRight", "ArrowDown", "+"):
        keys.press(key)
    weight(tab)
    keys.press("Escape")
    assert tab.evaluate(active).startswith("Layer 0, head 1")
    assert tab.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


@pytest.mark.slow
def test_the_address_keeps_the_state(cat, show):
    tab = show(cat[2])
    look(tab, "it", "cat")
    tab.get_by_label("Sort heads by").select_option("entropy")
    tab.locator(".hit").first.click()
    weight(tab)
    address = settled(tab)
    assert "layer=5&head=11" in address and "query=8&key=2" in address and "from=it&to=cat" in address
    tab.reload()
    weight(tab)
    assert settled(tab) == address
    assert tab.locator("#which").text_content() == "Layer 5, head 11"
    assert tab.locator(".cell-card .pair").text_content() == "it → cat"
    assert len(hits(tab)) == 72
    assert tab.locator("#sort").input_value() == "entropy"
    tab.go_back()
    tab.locator("#heads.sorted").wait_for()
    assert tab.locator("#head").is_hidden()
    tab.evaluate(
        "location.hash = 'layer=99&head=-1&query=x&key=1e9&zoom=NaN&sort=__proto__&view=%00&from=%3Cb%3E'"
    )
    tab.locator("#heads:not(.sorted)").wait_for()
    assert tab.locator("#head").is_hidden() and tab.locator("button.head:not(.mean)").count() == 72


# -- Other models -----------------------------------------------------------------------------------------


def check_pairs(tab, page, recording, pairs, tokens=None, query_tokens=None, batch=0) -> None:
    """Compare every head at some pairs of positions, on screen and in Python."""
    for query, key in pairs:
        found = look(tab, f"#{query}", f"#{key}")
        table = recording.find(query, key, tokens, query_tokens=query_tokens, batch=batch)
        wanted = {head_key(row) for row in table}
        check_hits([hit for hit in found if hit["head"] in wanted], table, stated(page))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Llama", "Gemma 2", "GPT-OSS"])
def test_decoders_grouped_heads_windows_and_padding(name, show):
    tiny = TINY[name]
    recording = watched(tiny.build(), **tiny.inputs("left"))
    tokens = [[f"Ġ{letter}" for letter in "abcdefghijk"], [f"Ġ{letter}" for letter in "ppppefghijk"]]
    page = recording.page(tokens, batch=1)
    tab = show(page)
    check_pairs(tab, page, recording, [(9, 6), (10, 4), (6, 1)], batch=1)
    check_hits(look(tab, "k", "p"), recording.find("k", "p", tokens, batch=1), stated(page))


@pytest.mark.slow
def test_attention_from_one_sequence_to_another(show):
    tiny = TINY["T5"]
    recording = watched(tiny.build(), **tiny.inputs("none", batch=1))
    source, target = list("abcdefghijk"), list("ABCDEFG")
    page = recording.page(source, query_tokens=target)
    tab = show(page)
    assert set(tab.locator(".kind").all_text_contents()) == {
        "encoder SelfAttention",
        "decoder SelfAttention",
        "decoder EncDecAttention",
    }
    error = stated(page)
    check_hits(look(tab, "F", "h"), recording.find("F", "h", source, query_tokens=target), error)
    check_hits(look(tab, "h", "c"), recording.find("h", "c", source), error)
    check_hits(look(tab, "F", "B"), recording.find("F", "B", target), error)


@pytest.mark.slow
def test_a_long_context_opens_with_an_overview(show):
    """With 2,048 tokens, heads whose weights fit have an overview too, the others only a thumbnail."""
    ids = torch.randint(3, 61, (1, 2048), generator=torch.Generator().manual_seed(0))
    recording = watched(TINY["Llama"].build(), input_ids=ids)
    tokens = [f"w{i}" for i in ids[0].tolist()]
    most = len(recording.page(tokens).html) - 100_000
    page = recording.page(tokens, max_bytes=most)
    assert len(page.html) <= most
    first, second = record(page)["layers"]
    assert first["payload"]["heads"] == [0, 1, 2, 3] and second["payload"] != first["payload"]
    assert [overview["size"] for overview in first["payload"]["overviews"]] == [[256, 256]] * 4
    assert first["thumbnails"]["size"] == [64, 64] and first["thumbnails"]["block"] == [32.0, 32.0]
    tab = show(page)
    tab.evaluate("location.hash = 'layer=0&head=2&query=2000&key=77'")
    want = float(recording[next(iter(recording))][0, 2, 2000, 77])
    assert float(weight(tab)) == pytest.approx(want, rel=stated(page)["relative"] + 1e-3, abs=5e-5)
    tab.locator('.map-box[data-missing="0"]').wait_for()
    assert "maximum of" in tab.locator(".map-status").text_content()


@pytest.mark.slow
def test_calls_of_a_layer_and_generated_text(show):
    tiny = TINY["Llama"]
    model = tiny.build()
    with torch.no_grad(), regard.watch(model) as recording:
        model(**tiny.inputs("none", batch=1))
        model(torch.arange(3, 12)[None])
    page = recording.page()
    tab = show(page)
    assert tab.locator("button.head:not(.mean)").evaluate_all(GRID)[::4] == [
        "0.0.0",
        "0.1.0",
        "1.0.0",
        "1.1.0",
    ]
    check_pairs(tab, page, recording, [(7, 2)])
    with torch.no_grad(), regard.watch(model) as recording:
        text = model.generate(torch.arange(3, 9)[None], max_new_tokens=4, do_sample=False, pad_token_id=0)
    page = recording.page([f"t{i}" for i in range(text.shape[1])])
    check_pairs(show(page), page, recording, [(8, 3)])


# -- Safe and sound ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_hostile_tokens_are_text(show):
    tiny = TINY["BERT"]
    recording = watched(tiny.build(), **tiny.inputs("none", batch=1))
    tokens = [*HOSTILE, "Ġ<b>"]
    page = recording.page(tokens, title=HOSTILE[0])
    tab = show(page)
    assert tab.title() == HOSTILE[0] == tab.locator("h1").text_content()
    for text in (*HOSTILE, "<b>"):
        found = look(tab, escape_unprintable(text), escape_unprintable(text))
        assert len(found) == 8 and escape_unprintable(text) in found[0]["text"]
    tab.locator(".hit").first.click()
    tab.get_by_role("radio", name="Lines").check()
    shown = tab.locator(".side0 .end bdi").all_text_contents()
    assert shown == [escape_unprintable(text) for text in tokens]
    assert tab.locator("#app script, #app img, #app b:has-text('Ġ')").count() == 0
    tab.evaluate("location.hash = 'from=%3Ciframe srcdoc=x onload=alert(1)%3E&to=%3Cscript%3E'")
    tab.locator("#results[data-ready]").wait_for(state="attached")
    assert "<iframe srcdoc=x onload=alert(1)>" in tab.locator("#search-status").text_content()


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "width"), SCREENS)
def test_axe_finds_no_serious_fault(show, scheme, width):
    page = uniform().page(list("abcdefghijk"))
    tab = show(page, viewport={"width": width, "height": 800}, color_scheme=scheme)
    tab.locator("#findings summary").click()
    look(tab, "d", "c")
    assert faults(tab) == []
    tab.get_by_label("Sort heads by").select_option("first")
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    tab.locator('[data-head="1.0.2"]').last.click()
    tab.locator(".map").press("ArrowDown")
    weight(tab)
    assert faults(tab) == []
    tab.get_by_role("radio", name="Lines").check()
    tab.get_by_role("button", name="query 3: d").click()
    assert faults(tab) == []
    assert tab.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.slow
def test_a_notebook_shows_the_page_in_a_sandbox(cat, browser):
    context = browser.new_context()
    tab = context.new_page()
    said = []
    tab.on("console", lambda message: said.append(message.text))
    tab.on("pageerror", lambda error: said.append(f"{error}"))
    tab.set_content(f"<!DOCTYPE html><title>notebook</title>{cat[2]._repr_html_()}")
    frame = tab.frame_locator("iframe")
    frame.get_by_role("button", name="Layer 5, head 11").click()
    frame.get_by_role("button", name="All heads").click()
    frame.get_by_label("Query token").fill("it")
    frame.get_by_label("Key token").fill("cat")
    frame.get_by_role("button", name="Find").click()
    frame.locator(".hit").first.wait_for()
    assert "0.71" in frame.locator(".hit").first.text_content()
    assert said == []
    context.close()
