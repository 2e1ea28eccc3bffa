"""The pipeline explorer in a real browser: matrices, walk, changed numbers, own sentences; compared with Python."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

import regard
from regard import explore
from regard.explore.explorers import MAX_NUMBERS
from regard.learn import cat
from regard.render.text import escape_unprintable, format_factor, format_number, format_vector
from tests.helpers.pages import (
    HOSTILE,
    LOADED,
    SCREENS,
    faults,
    format_column,
    format_vectors,
    pace,
    run_in_node,
)

slow = pytest.mark.slow  # starts a browser
STEPS = ["Compare", "Scale", "Normalise", "Aggregate"]


def expected(steps, step: int) -> list[list[str]]:
    """The cells of the table for an explanation."""
    names, count = list(steps.key_tokens), len(steps.key_tokens)
    masked = np.asarray(steps.scores) == -np.inf
    scores = [
        "masked" if hidden else text for hidden, text in zip(masked, format_column(steps.scores), strict=True)
    ]
    sums, weights = format_column(steps.raw_scores), format_column(steps.weights)
    if step == 0:
        products = [
            " + ".join(
                f"{format_factor(q)}·{format_factor(k)}" for q, k in zip(steps.query, key, strict=True)
            )
            for key in steps.key
        ]
        columns = [format_vectors(steps.key), products, sums]
    elif step == 1:
        columns = [sums, [f"× {format_number(steps.scale)}"] * count, scores]
    elif step == 2:
        columns = [scores, format_column(steps.exponentials), weights, [""] * count]
    else:
        mixed = format_vectors([*steps.contributions, steps.output])[:-1]
        columns = [weights, format_vectors(steps.value), mixed]
    return [list(row) for row in zip(names, *columns, strict=True)]


# The numbers of every matrix on the screen, null where nothing is shown yet.
GRIDS = """() => Object.fromEntries([...document.querySelectorAll(".grid")].map((grid) => [grid.id.slice(5),
  [...grid.tBodies[0].rows].map((row) => [...row.querySelectorAll("td")].map((it) => it.dataset.value || null))]))"""


def grids(tab) -> dict[str, np.ndarray]:
    """The matrices on the screen; NaN where a number is not shown, Kᵀ turned back into K."""

    def read(rows):
        return np.array(
            [[np.nan if x is None else float(x.replace("Infinity", "inf")) for x in row] for row in rows]
        )

    found = {name: read(rows) for name, rows in tab.evaluate(GRIDS).items()}
    return {**found, "K": found["K"].T}


def cell(tab, name: str, i: int, j: int):
    return tab.locator(f"#grid-{name} tbody tr").nth(i).locator("td").nth(j)


def marked(tab, kind: str) -> set[tuple[str, int, int]]:
    """The cells of a class, with the name of their matrix."""
    script = """(kind) => [...document.querySelectorAll(`.grid td.${kind}`)].map((cell) =>
      [cell.closest("table").id.slice(5), cell.parentNode.sectionRowIndex, cell.cellIndex - 1])"""
    return {tuple(found) for found in tab.evaluate(script, kind)}


def check_against_library(tab, tokens=cat.tokens, **options) -> None:
    """Compare scores, weights and output on screen with those that regard computes from Q, K, V on screen."""
    seen = grids(tab)
    A = regard.attention(seen["Q"], seen["K"], **options)
    tab.get_by_role("navigation").get_by_role("button", name="Normalise").click()
    seen = grids(tab)
    np.testing.assert_allclose(seen["weights"], A.to_dense(), rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(seen["output"], A @ seen["V"], rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(seen["scores"], A.scores[...], rtol=1e-12)
    assert seen["scores"].shape == (len(tokens), len(tokens))


# -- Numbers ----------------------------------------------------------------------------------------------

# Goes through queries and steps in the page itself, one call instead of hundreds.
HARVEST = """async () => {
  document.querySelector("details").open = true;
  await new Promise((done) => setTimeout(done, 50)); // the toggle event
  return [...document.querySelectorAll(".chip input")].map((radio) => {
    radio.click();
    return [...document.querySelectorAll(".steps button")].map((button) => {
      button.click();
      return [...document.querySelectorAll("#numbers tbody tr")].map((r) => [...r.cells].map((c) => c.textContent));
    }).concat(document.querySelector("#row-formula").textContent);
  });
}"""


@slow
@pytest.mark.parametrize("mask", [None, regard.padding([4])], ids=repr)
def test_matrices_and_tables_agree_with_the_library(show, mask):
    tab = show(explore.pipeline(cat.Q, cat.K, cat.V, tokens=cat.tokens, mask=mask))
    np.testing.assert_array_equal(grids(tab)["scores"], cat.Q @ cat.K.T)  # before scaling and masking
    for scaled in (True, False):
        tab.get_by_label("scale", exact=True).set_checked(scaled)
        for causal in (True, False):
            tab.get_by_label("causal mask").set_checked(causal)
            both = regard.causal() if mask is None else regard.causal() & mask
            options = {"mask": both if causal else mask, "scale": None if scaled else 1.0}
            A = regard.attention(cat.Q, cat.K, **options)
            every = [A.explain(i, cat.V, cat.tokens) for i in range(5)]
            assert tab.evaluate(HARVEST) == [
                [*(expected(steps, step) for step in range(4)), f"output = {format_vector(steps.output)}"]
                for steps in every
            ]
            check_against_library(tab, **options)


@slow
def test_a_click_on_a_cell_shows_the_product_behind_it(show):
    tab = show(explore.pipeline())
    A = regard.attention(cat.Q, cat.K)
    for i, j in [(2, 1), (4, 4)]:
        cell(tab, "scores", i, j).click()
        assert tab.locator("h2").text_content() == "1. Compare"
        assert (
            f"“{cat.tokens[j]}” fit what “{cat.tokens[i]}” looks for"
            in tab.locator("#description").text_content()
        )
        steps = A.explain(i, cat.V, cat.tokens)
        products = expected(steps, 0)[j][2]
        assert tab.locator("#formula").text_content() == f"{products} = {format_number(steps.raw_scores[j])}"
        assert marked(tab, "at-work") == {("scores", i, j)}
        assert marked(tab, "factor") == {("Q", i, d) for d in range(4)} | {("K", d, j) for d in range(4)}
    steps = A.explain(1, cat.V, cat.tokens)
    cell(tab, "weights", 1, 2).click()
    weight = (
        f"exp({format_number(steps.scores[2])} − {format_number(steps.shift)}) / {format_number(steps.total)}"
    )
    assert tab.locator("#formula").text_content() == f"{weight} = {format_number(steps.weights[2])}"
    assert "The largest share, 40.3 %, goes to “The”" in tab.locator("#description").text_content()
    assert marked(tab, "factor") == {("scores", 1, j) for j in range(5)}
    cell(tab, "scores", 1, 2).click()  # after the scaling, so the matrix shows scaled scores
    assert tab.locator("#formula").text_content() == "2 × 0.5 = 1"
    cell(tab, "output", 1, 3).click()
    assert tab.locator("#formula").text_content().endswith(f" = {format_number(steps.output[3])}")
    assert marked(tab, "at-work") == {("output", 1, 3)}
    assert marked(tab, "factor") == {("weights", 1, j) for j in range(5)} | {("V", j, 3) for j in range(5)}
    assert "query cat" in tab.get_by_role("status").text_content()
    assert tab.get_by_role("radio", name="cat").is_checked()


@slow
def test_pipeline_of_own_arrays(show):
    rng = np.random.default_rng(3)
    query, key = rng.normal(size=(2, 11)), rng.normal(size=(3, 11))
    mask = regard.masks.dense([[True, False, True], [False] * 3])
    tab = show(explore.pipeline(query, key, mask=mask))
    assert tab.get_by_label("causal mask").count() == 0  # not square
    assert tab.get_by_label("Your sentence").count() == 0
    assert tab.locator(".steps li").count() == 3  # no value: nothing to aggregate
    assert set(grids(tab)) == {"Q", "K", "scores", "weights"}
    tab.get_by_role("button", name="Scale").click()
    tab.get_by_text("Every number").click()
    assert tab.locator("#row-formula").text_content() == "score = sum × 0.3015, then " + repr(mask)
    tab.get_by_role("radio", name="query 1").check()
    tab.get_by_role("button", name="Normalise").click()
    assert "Every key is masked" in tab.locator("#description").text_content()
    assert grids(tab)["weights"][1].tolist() == [0, 0, 0]
    assert cell(tab, "scores", 1, 2).text_content() == "−∞"
    tab = show(explore.pipeline(query, key, key, mask=~regard.masks.first(3)))
    tab.get_by_role("button", name="Aggregate").click()
    assert "Every key is masked" in tab.locator("#description").text_content()
    assert not grids(tab)["output"].any()


@slow
def test_masked_values_that_are_not_finite_have_no_effect(show):
    key = np.array([[1.0, 2.0], [np.nan, np.inf], [0.5, -1.0]])
    value = np.array([[1.0], [np.nan], [3.0]])
    mask = regard.masks.dense([[True, False, True]])
    tab = show(explore.pipeline([[1.0, 1.0]], key, value, mask=mask))
    tab.get_by_label("scale", exact=True).uncheck()
    steps = regard.attention([[1.0, 1.0]], key, mask=mask, scale=1.0).explain(0, value)
    [found] = tab.evaluate(HARVEST)
    assert found == [*(expected(steps, step) for step in range(4)), f"output = {format_vector(steps.output)}"]
    np.testing.assert_allclose(grids(tab)["output"], [steps.output], rtol=1e-12)
    cell(tab, "K", 0, 1).click()
    assert cell(tab, "K", 0, 1).text_content() == "nan"


# -- Changed numbers --------------------------------------------------------------------------------------


@slow
def test_numbers_are_changed_in_their_cells(show):
    tab = show(explore.pipeline())
    Q, K, V = (np.array(x) for x in (cat.Q, cat.K, cat.V))
    keys = tab.keyboard
    cell(tab, "Q", 2, 1).click()
    assert tab.locator("h2").text_content() == "Change a number: Q of sat"
    assert marked(tab, "touched") == {
        (name, 2, j) for name, size in (("scores", 5), ("weights", 5), ("output", 4)) for j in range(size)
    }
    keys.type("-1.5")
    keys.press("Enter")
    Q[2, 1] = -1.5
    check_against_library(tab)
    np.testing.assert_array_equal(grids(tab)["Q"], Q)
    cell(tab, "K", 3, 1).click()  # Kᵀ: entry 3 of "cat"
    keys.press("F2")
    keys.type("2,5")
    keys.press("Tab")  # a comma is a point, and Tab goes to the next cell
    K[1, 3] = 2.5
    np.testing.assert_array_equal(grids(tab)["K"], K)
    assert marked(tab, "selected") == {("K", 3, 2)}
    assert tab.evaluate("document.activeElement.cellIndex") == 3
    for typed in ("7", "Escape"), ("x", "Enter"), ("--", "Enter"), ("9999999", "Enter"):
        keys.press("Enter")
        keys.type(typed[0])
        keys.press(typed[1])
    np.testing.assert_array_equal(grids(tab)["K"], K)  # dropped, not a number, or too large
    before = grids(tab)["weights"]
    cell(tab, "V", 4, 0).click()
    cell(tab, "V", 4, 0).click()  # the second click edits
    tab.locator(".grid input").fill("4")
    cell(tab, "V", 0, 0).click()  # leaving the cell keeps the number
    V[4, 0] = 4
    np.testing.assert_array_equal(grids(tab)["V"], V)
    np.testing.assert_array_equal(grids(tab)["weights"], before)
    assert "no weight moves: only column 0" in tab.locator("#change").text_content()
    check_against_library(tab)
    np.testing.assert_array_equal(grids(tab)["scores"], Q @ K.T / 2)
    tab.get_by_role("button", name="Reset").click()
    np.testing.assert_array_equal(grids(tab)["K"], cat.K)
    assert tab.get_by_role("button", name="Reset").is_disabled()


@slow
def test_the_slider_and_the_arrow_keys_reach_every_number(show):
    tab = show(explore.pipeline())
    tab.locator("#grid-K td[tabindex='0']").focus()
    tab.keyboard.press("ArrowDown")
    tab.keyboard.press("End")
    assert marked(tab, "selected") == {("K", 1, 4)}
    tab.keyboard.press("Home")
    assert tab.get_by_role("status").text_content() == "K of The, number 1 is 1"
    tab.keyboard.press("Tab")  # one stop for each matrix
    assert tab.evaluate("document.activeElement.closest('table').id") == "grid-Q"
    cell(tab, "Q", 0, 0).click()
    slider = tab.get_by_role("slider", name="value")
    for _ in range(15):
        slider.press("ArrowRight")
    assert slider.get_attribute("aria-valuetext") == "2.5"
    assert cell(tab, "Q", 0, 0).text_content() == "2.5"
    weights = regard.attention([[2.5, 0, 1, 0]], cat.K).to_dense()[0]
    best = int(weights.argmax())
    text = f"“The” now takes most from “{cat.tokens[best]}”: {100 * weights[best]:.3g} %."
    assert tab.locator("#change").text_content() == text
    assert tab.get_by_role("status").text_content() == f"Q of The, number 0 is 2.5. {text}"
    check_against_library(tab)
    tab.locator("#grid-weights td[tabindex='0']").press("ArrowDown")
    assert marked(tab, "at-work") == {("weights", 1, 0)}


@slow
def test_an_own_sentence(show):
    tab = show(explore.pipeline())
    field = tab.get_by_label("Your sentence")
    field.fill("the Dog, CAT")
    assert tab.locator(".chip").all_text_contents() == ["the", "Dog", ",", "CAT"]
    first = grids(tab)
    np.testing.assert_array_equal(first["Q"][[0, 3]], cat.Q[:2])  # words of the example keep their numbers
    assert "a model would learn them" in tab.locator("#words-note").text_content()
    check_against_library(tab, tokens=["the", "Dog", ",", "CAT"])
    tab.get_by_label("causal mask").check()
    check_against_library(tab, tokens=["the", "Dog", ",", "CAT"], mask=regard.causal())
    field.fill("dog")
    np.testing.assert_array_equal(grids(tab)["V"][0], first["V"][1])  # the same word, the same numbers
    field.fill("")  # an empty sentence has no matrix
    assert tab.locator(".chip").all_text_contents() == ["dog"]
    field.fill("<img src=x onerror=alert(1)> a b c")
    assert tab.locator(".chip").all_text_contents() == ["<", "img", "src", "=", "x", "onerror", "=", "alert"]
    assert tab.locator("#words-note").text_content().endswith("The first 8 words are used.")
    assert tab.locator("img").count() == 0
    tab.get_by_role("button", name="Reset").click()
    assert field.input_value() == "The cat sat on mat" and tab.locator("#words-note").text_content() == ""


def test_numbers_of_words_in_node():
    script = """
    const words = ["cat", "dog", "élan", "猫", "a", "b"], kinds = ["query", "key", "value"];
    const all = words.map((word) => kinds.map((kind) => wordVector(word, kind, 4)));
    console.log(JSON.stringify({ all, split: splitWords("Don't stop -- it's 9,5 naïve…", 20), cells:
      [[0.09, 0.403, 1], [1, 0, 2], [1, 0.5, -1], [-3.14159, 12.345, 0.25], [0.29756, 4e-5, 0], [1e6, 0.5, -1000],
       [-Infinity, 99999.4, 0.5], [-0.04, 0.01, 0]].map((row) => row.map(cellFormat(row))),
      parsed: ["1", " -2,5 ", "−1", "", "x", "1e9", "Infinity"].map(parseCell) }));
    """
    found = json.loads(run_in_node(script, "components/wordVectors", "components/cellNumber"))
    vectors = np.array(found["all"])
    assert np.unique(vectors.reshape(18, 4), axis=0).shape == (18, 4)  # no two are equal
    assert set(np.unique(vectors)) <= {-1, -0.5, 0, 0.5, 1, 1.5, 2}
    assert found["split"] == {
        "words": ["Don't", "stop", "--", "it's", "9", ",", "5", "naïve", "…"],
        "leftOut": 0,
    }
    assert found["cells"] == [
        ["0.090", "0.403", "1.000"],
        ["1", "0", "2"],
        ["1.0", "0.5", "−1.0"],
        ["−3.14", "12.35", "0.25"],
        ["0.298", "4e-5", "0.000"],
        ["1e6", "0.5", "−1000"],
        ["−∞", "99999", "0.5"],
        ["−0.04", "0.01", "0.00"],
    ]
    assert found["parsed"] == [1, -2.5, -1, None, None, None, None]


# -- The walk ---------------------------------------------------------------------------------------------


@slow
def test_the_walk_goes_through_every_product_of_every_query(show):
    tab = show(explore.pipeline(), reduced_motion="reduce")
    places = tab.evaluate("""() => {
      const found = [];
      for (;;) {
        const [cell] = document.querySelectorAll(".grid td.at-work");
        found.push([document.querySelector("h2").textContent, document.querySelectorAll(".chip input:checked").length,
          [...document.querySelectorAll(".chip input")].findIndex((it) => it.checked), cell.cellIndex - 1]);
        if (document.querySelector("#next").disabled) return found;
        document.querySelector("#next").click();
      }
    }""")
    want = [
        [f"{step + 1}. {name}", 1, i, column]
        for i in range(5)
        for step, name in enumerate(STEPS)
        for column in range({0: 5, 3: 4}.get(step, 1))
    ]
    assert places == want
    tab.evaluate("document.activeElement.blur()")
    tab.keyboard.press("ArrowLeft")
    assert marked(tab, "at-work") == {("output", 4, 2)}
    tab.get_by_role("navigation").get_by_role("button", name="Scale").press("Enter")
    assert tab.locator('[aria-current="step"]').text_content() == "2Scale"
    tab.keyboard.press("ArrowRight")
    assert tab.locator("h2").text_content() == "3. Normalise"


@slow
def test_playing_reveals_one_product_after_another(show):
    tab = show(explore.pipeline(), reduced_motion="reduce")
    tab.clock.install(time=0)
    tab.clock.pause_at(60_000)  # otherwise it also runs by itself
    tab.get_by_role("radio", name="mat").check()
    tab.locator("#play").click()
    seen = grids(tab)
    assert np.isfinite(seen["scores"]).sum() == 21 and np.isfinite(seen["output"]).sum() == 16
    tab.clock.run_for(2000)  # four products later
    seen = grids(tab)
    np.testing.assert_array_equal(seen["scores"][4], cat.Q[4] @ cat.K.T)
    assert np.isnan(seen["weights"][4]).all() and np.isfinite(seen["weights"][:4]).all()
    tab.clock.run_for(1000)
    assert np.isfinite(grids(tab)["weights"]).all() and np.isnan(grids(tab)["output"][4]).all()
    tab.locator("#play").click()
    assert tab.locator("#play").text_content() == "▶ Play"
    tab.clock.run_for(3000)
    assert np.isnan(grids(tab)["output"][4]).all()  # it stands still
    tab.locator("#speed").fill("4")
    tab.locator("#play").click()
    tab.clock.run_for(125 * 3)
    tab.locator("#speed").fill("3")
    assert np.isfinite(grids(tab)["output"][4]).sum() == 3
    tab.clock.run_for(500)  # the last product, then the end
    assert np.isfinite(grids(tab)["output"]).all()
    assert tab.locator("#play").text_content() == "▶ Play" and not tab.locator("#show-all").is_visible()
    tab.keyboard.press("Home")
    tab.evaluate("document.activeElement.blur()")
    tab.keyboard.press("Space")
    assert np.isfinite(grids(tab)["scores"]).sum() == 1  # from the start
    tab.get_by_role("button", name="Show all").click()
    assert np.isfinite(grids(tab)["output"]).all()


@slow
@pytest.mark.parametrize("motion", ["no-preference", "reduce"])
def test_numbers_fly_only_if_motion_is_welcome(show, motion):
    tab = show(explore.pipeline(), reduced_motion=motion)
    # In one script, since a flight is short.
    count = """(button) => { button.click();
      return [document.querySelectorAll(".flights span").length, document.getAnimations().length]; }"""
    normalise = tab.get_by_role("navigation").get_by_role("button", name="Normalise")
    for button, numbers in ((tab.locator("#next"), 8), (normalise, 5)):
        flying, moving = button.evaluate(count)
        assert (flying, moving > 0) == ((numbers, True) if motion == "no-preference" else (0, False))
    tab.locator(".flights span").first.wait_for(state="detached")
    assert marked(tab, "at-work") == {("weights", 0, j) for j in range(5)}


# -- Any reader -------------------------------------------------------------------------------------------


@slow
def test_hostile_tokens_are_text(show):
    n = len(HOSTILE)
    numbers = np.eye(n)
    tab = show(explore.pipeline(numbers, numbers, numbers, tokens=HOSTILE))
    shown = [escape_unprintable(token) for token in HOSTILE]
    assert [row[0] for row in tab.evaluate(HARVEST)[0][0]] == shown
    assert tab.locator(".chip").all_text_contents() == shown
    assert tab.locator("#grid-Q tbody th").all_text_contents() == shown
    assert tab.locator("script").count() == 2 and tab.locator("img").count() == 0
    tab.locator(".chip").nth(0).click()
    assert shown[0] in tab.get_by_role("status").text_content()
    assert shown[0] in tab.locator("#description").text_content()


@slow
@pytest.mark.parametrize(("scheme", "width"), SCREENS)
def test_it_fits_and_axe_finds_no_serious_fault(show, scheme, width):
    touch = width == 390
    options = {"viewport": {"width": width, "height": 844}, "color_scheme": scheme, "has_touch": touch}
    tab = show(explore.pipeline(), reduced_motion="reduce", **options)
    assert tab.evaluate(LOADED) < 20 * pace(tab)
    tab.get_by_text("Every number").click()
    for step, name in enumerate(STEPS):
        tab.get_by_role("navigation").get_by_role("button", name=name).click()
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        assert tab.locator(".scroll").first.evaluate("box => box.scrollWidth <= box.clientWidth")
        if step in (0, 3):
            assert faults(tab) == []
    # At once, since the page may be scrolling.
    tops = tab.locator("#grid-scores, #grid-weights").evaluate_all(
        "nodes => nodes.map((node) => node.getBoundingClientRect().top)"
    )
    assert (tops[0] == tops[1]) == (width == 1280)  # one line of matrices, or two
    target = cell(tab, "Q", 1, 2)
    (target.tap if touch else target.click)()
    assert target.text_content() == "0" and faults(tab) == []
    (target.tap if touch else target.click)()
    tab.locator(".grid input").fill("-2")
    tab.locator(".grid input").press("Enter")
    assert target.text_content() == "−2"
    box = target.bounding_box()
    assert box["width"] >= 24 and box["height"] >= 24  # large enough for a finger
    dark = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", dark))) < 200) == (scheme == "dark")


# -- Arguments --------------------------------------------------------------------------------------------


def test_tensors_and_arrays_make_equal_pages():
    torch = pytest.importorskip("torch")
    Q, K, V = (torch.tensor(np.array(x), requires_grad=True) for x in (cat.Q, cat.K, cat.V))

    def record(page):
        return json.loads(re.search(r'id="record">(.*?)<', page.html, re.DOTALL)[1])

    ours, theirs = record(explore.pipeline()), record(explore.pipeline(Q, K, V, tokens=cat.tokens))
    assert ours["tokens"] == theirs["tokens"]
    for mine, yours in zip(ours["rows"], theirs["rows"], strict=True):
        for name in ("weights", "output"):
            np.testing.assert_allclose(yours[name], mine[name], rtol=1e-12)
    assert record(explore.weights(Q, K))["raw_scores"] == record(explore.weights())["raw_scores"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (dict(query=cat.Q), "a query without a key"),
        (dict(key=cat.K), "a key without a query"),
        (dict(query=np.ones((2, 3, 4)), key=cat.K), "query with 3 axes"),
        (dict(tokens=["a"]), "1 tokens; expected 5"),
        (dict(query=np.ones((0, 4)), key=cat.K), "0 queries and 5 keys"),
        (dict(query=np.ones((99, 4)), key=np.ones((99, 4))), "numbers to show; expected at most 10000"),
    ],
)
def test_pipeline_refuses(arguments, words):
    with pytest.raises(regard.ArgumentError, match=re.escape(words)):
        explore.pipeline(**arguments)


def test_the_largest_page_stays_below_300_kb():
    x = np.random.default_rng(0).normal(size=(36, 12))
    assert 36 * (36 * 6 + 24) + 36 * 24 > 0.94 * MAX_NUMBERS
    assert len(explore.pipeline(x, x, x).html.encode()) <= 300_000
