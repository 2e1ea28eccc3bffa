"""The cost explorer in a real browser: steps and counters are compared with those of `regard.learn`."""

from __future__ import annotations

import re
from dataclasses import fields

import numpy as np
import pytest

import regard
from regard import explore
from regard.explore.explorers import COUNTERS, DOUBLINGS, MAX_MULTIPLICATIONS, list_events
from regard.learn import Cost, attention_by_loops, cat, cost_table, iter_multiplications, three_by_three
from regard.render.text import escape_unprintable, format_factor, format_number, format_vector
from tests.helpers.pages import HOSTILE, SCREENS, common_format, faults, format_matrix

pytestmark = pytest.mark.slow  # starts a browser

Q, K, V = three_by_three.Q, three_by_three.K, three_by_three.V

# All that the page shows of a step, in one call.
SHOWN = """() => {
  const text = (what) => [...document.querySelectorAll(what)].map((node) => node.textContent);
  const cells = (what) => [...document.querySelectorAll(`#product .${what} tbody tr`)]
    .map((row) => [...row.querySelectorAll("td")].map((cell) => cell.textContent));
  return { title: text("#walk-title")[0], sum: text("#sum")[0], counters: text("#counters b").map(Number),
    left: cells("left"), right: cells("right"), result: cells("product-result"),
    factors: text("#product .factor"), work: text("#product .at-work") };
}"""
EVERY_STEP = f"""() => {{
  const shown = {SHOWN}, steps = [];
  while (!document.getElementById("step").disabled) {{
    document.getElementById("step").click();
    steps.push(shown());
  }}
  return steps;
}}"""


def wanted(Q, K, V, queries, tokens, seen) -> list[dict]:
    """The expected state of the page after each step, from the loops of `regard.learn`."""
    (n_q, d_k), (n_k, d_v) = Q.shape, V.shape
    loops = attention_by_loops(Q, K, V, seen)
    made = {
        "scores": np.full((n_q, n_k), "·", dtype=object),
        "output": np.full((n_q, d_v), "·", dtype=object),
    }
    products = list(iter_multiplications(Q, K, V, seen))
    formats = {name: common_format([step.total for step in products if step.table == name]) for name in made}
    made["scores"][~seen] = "masked"
    made["output"][~seen.any(axis=1)] = formats["output"](0)
    totals = {}
    weights = np.full((n_q, n_k), "·", dtype=object)
    counts = dict.fromkeys(COUNTERS, 0)
    steps = []

    def multiplied(step) -> dict:
        place = step.table, step.row, step.column
        of, before, total = queries[step.row], totals.get(place), format_number(step.total)
        totals[place], entry = total, formats[step.table](step.total)
        made[step.table][step.row, step.column] = entry
        scores = step.table == "scores"
        factors = [common_format(x.ravel()) for x in ((Q, K) if scores else (loops.weights, V))]
        counts["score_multiply_adds" if scores else "value_multiply_adds"] += 1
        product = f"{format_factor(step.left)} · {format_factor(step.right)} = {total}"
        return {
            "title": f"Score of {of} → {tokens[step.column]}"
            if scores
            else f"Output of {of}, entry {step.column}",
            "sum": product if before is None else f"{before} + {product}",
            "left": format_matrix(Q) if scores else weights.tolist(),
            "right": format_matrix(K.T if scores else V),
            "result": made[step.table].tolist(),
            "factors": sorted([factors[0](step.left), factors[1](step.right)]),
            "work": [entry],
            "counters": list(counts.values()),
        }

    steps += [multiplied(step) for step in products if step.table == "scores"]
    for i in range(n_q):
        alone = attention_by_loops(Q[i : i + 1], K, V, seen[i : i + 1]).counts
        for name in COUNTERS[2:]:
            counts[name] += getattr(alone, name)
        weights[i] = format_matrix(loops.weights)[i]
        steps.append(
            {
                "title": f"Weights of {queries[i]}",
                "sum": f"softmax([{', '.join(made['scores'][i])}] / √{d_k}) = {format_vector(loops.weights[i])}",
                "left": weights.tolist(),
                "right": format_matrix(V),
                "result": made["output"].tolist(),
                "factors": [],
                "work": weights[i].tolist(),
                "counters": list(counts.values()),
            }
        )
    steps += [multiplied(step) for step in products if step.table == "output"]
    np.testing.assert_allclose([float(x) for x in made["output"].flat], loops.output.ravel(), atol=6e-5)
    return steps


def show_products(tab):
    """Leave the story for every multiplication."""
    tab.get_by_role("radio", name="every multiplication").check()
    return tab


def narration(Q, K, V, weights, names) -> list[str]:
    """The sentence about each multiplication of the example, written by the rules that the page follows."""
    said = []
    for step in iter_multiplications(Q, K, V):
        row, column, term = step.row, step.column, step.term
        if step.table == "output":
            share = f"{100 * weights[row, term]:.3g} %"
            text = f"Of number {column} of “{names[term]}”, which is {format_number(V[term, column])}, "
            text += f"“{names[row]}” takes {share}."
            if term == len(K) - 1:
                text += f" That makes {format_number(step.total)}"
                text += f": the new “{names[row]}” is complete." if column == V.shape[1] - 1 else "."
            said.append(text)
            continue
        product = step.left * step.right
        text = f"Does “{names[column]}” offer what “{names[row]}” looks for? Compare them number by number. "
        text = text if term == 0 else ""
        text += f"In number {term} " + (
            f"they agree, and the match grows by {format_number(product)}."
            if product
            else "one of them is 0, which adds nothing."
        )
        if term == Q.shape[1] - 1:
            scores = Q[row] @ K[: column + 1].T
            best = scores[:-1].max(initial=-np.inf)
            rival = names[int(scores[:-1].argmax())] if column else ""
            text += f" The score is {format_number(scores[-1])}" + (
                "."
                if not column
                else f": the best match of “{names[row]}” so far."
                if scores[-1] > best
                else ": as good as the best so far."
                if scores[-1] == best
                else f": not as good as “{rival}”."
            )
        said.append(text)
    return said


def every_step(tab) -> list[dict]:
    steps = tab.evaluate(EVERY_STEP)
    for step in steps:
        step["factors"].sort()
    return steps


def test_the_example_step_by_step(show):
    tab = show_products(show(explore.cost()))
    opening = tab.evaluate(SHOWN)
    assert opening["counters"] == [0] * 6 and opening["result"] == [["·"] * 3] * 3
    names = list(three_by_three.tokens)
    steps = every_step(tab)
    assert len(steps) == 27 + 3 + 27
    assert steps == wanted(Q, K, V, names, names, np.ones((3, 3), bool))
    counts = attention_by_loops(Q, K, V).counts
    assert steps[-1]["counters"] == [getattr(counts, name) for name in COUNTERS]
    assert tab.locator("#counters dd").all_text_contents() == [f"{n} of {n}" for n in steps[-1]["counters"]]


def test_every_multiplication_has_a_sentence(show):
    tab = show_products(show(explore.cost()))
    said = tab.evaluate("""() => {
      const found = [];
      while (!document.getElementById("step").disabled) {
        document.getElementById("step").click();
        found.push(document.getElementById("words").textContent);
      }
      return found;
    }""")
    weights = regard.attention(Q, K).to_dense()
    want = narration(Q, K, V, weights, three_by_three.tokens)
    assert said[:27] + said[30:] == want
    assert said[27] == (
        "Softmax turns the scores of “cats” into shares that make 100 %. “fish” matched best and gets 67 %."
    )
    assert said[29].endswith("“cats” and “fish” matched best and get 39 % each.")  # a tie


STORY = """() => {
  const text = (id) => document.getElementById(id).textContent, found = [];
  for (;;) {
    const marked = [...document.querySelectorAll("#product .factor, #product .line")].length;
    found.push([text("walk-title"), text("sum"), text("words"), marked]);
    if (document.getElementById("step").disabled) return found;
    document.getElementById("step").click();
  }
}"""


def test_the_story(show):
    tab = show(explore.cost())
    told = tab.evaluate(STORY)
    assert len(told) == 27 and all(len(words) > 40 for _, _, words, _ in told)
    assert len({words for _, _, words, _ in told}) == 27  # each says something of its own
    titles = [title for title, *_ in told]
    assert titles[:4] == ["The query", "The key", "The plan", "Score of “cats” → “cats”"]
    assert titles[12:17] == ["Scale", "Weights of cats", "Weights of like", "Weights of fish", "The value"]
    assert [marked for *_, marked in told[:4]] == [9, 9, 0, 6]  # what is introduced, then a row and a column
    A = regard.attention(Q, K)
    scores, output = Q @ K.T, A @ V
    for n, (_, total, _, _) in enumerate(told[3:12]):
        assert total.endswith(f" = {format_number(scores[n // 3, n % 3])}")
    for n, (_, total, _, _) in enumerate(told[17:26]):
        assert total.endswith(f" = {format_number(output[n // 3, n % 3])}")
    assert told[20][2].endswith(
        "Most of it comes from “fish”."
    )  # 0.17 · 2, although “like” has the larger share
    assert told[19][2].endswith("a mixture with 67 % of “fish”.")
    assert told[25][2].endswith("a mixture with 39 % each of “cats” and “fish”.")
    assert "54 multiplications" in told[26][2]
    tab.keyboard.press("ArrowLeft")
    assert tab.get_by_role("status").text_content().startswith("step 26 of 27. Output of “fish”, number 2: ")
    show_products(tab)  # the same place, in single steps
    assert done(tab) == 57
    tab.locator("#steps").fill("5")
    tab.get_by_role("radio", name="the story").check()
    assert (
        tab.locator("#walk-title").text_content() == "Score of “cats” → “cats”"
    )  # the last that is complete
    tab.get_by_role("navigation").get_by_role("button", name="Normalise").click()
    assert tab.locator("#walk-title").text_content() == "Weights of cats"


def test_the_story_of_masked_and_strange_numbers(show):
    query, key = np.array([[1.0, -1.0], [0.0, 2.0]]), np.array([[1.0, 1.0], [np.nan, 1.0], [2.0, 0.0]])
    mask = regard.masks.dense(np.array([[True, False, True], [False] * 3]))
    tab = show(explore.cost(query, key, np.zeros((3, 1)), mask=mask))
    told = tab.evaluate(STORY)
    assert [title for title, *_ in told][3:] == [
        "Score of “query 0” → “key 0”",
        "Score of “query 0” → “key 2”",
        "Scale",
        "Weights of query 0",
        "Weights of query 1",
        "The value",
        "Output of “query 0”, number 0",
        "Done",
    ]
    assert told[7][2] == "“query 1” may look at nothing: its shares are all 0."
    show_products(tab)
    tab.locator("#steps").fill("2")
    assert (
        tab.locator("#words")
        .text_content()
        .startswith("In number 1 they disagree, and the match shrinks by 1.")
    )


def test_own_arrays_with_a_mask(show):
    rng = np.random.default_rng(5)
    own = rng.normal(size=(2, 3)), rng.normal(size=(4, 3)), rng.normal(size=(4, 2))
    for mask, seen in [
        (None, np.ones((2, 4), bool)),
        (
            regard.masks.dense(np.array([[1, 0, 1, 1], [0, 0, 0, 0]], bool)),
            np.array([[1, 0, 1, 1], [0] * 4], bool),
        ),
        (~regard.masks.first(4), np.zeros((2, 4), bool)),
    ]:
        tab = show_products(show(explore.cost(*own, mask=mask)))
        steps = every_step(tab)
        assert steps == wanted(*own, ["query 0", "query 1"], [f"key {j}" for j in range(4)], seen)
        counts = attention_by_loops(*own, seen).counts
        assert steps[-1]["counters"] == [getattr(counts, name) for name in COUNTERS]
    causal = np.tril(np.ones((5, 5), bool))
    tab = show_products(show(explore.cost(cat.Q, cat.K, cat.V, tokens=cat.tokens, mask=regard.causal())))
    assert every_step(tab) == wanted(cat.Q, cat.K, cat.V, cat.tokens, cat.tokens, causal)


def test_masked_numbers_that_are_not_finite_have_no_effect(show):
    key, value = K.copy(), V.copy()
    key[2], value[2] = np.nan, np.inf
    tab = show_products(show(explore.cost(Q, key, value, mask=regard.masks.first(2))))
    last = every_step(tab)[-1]
    output = attention_by_loops(Q, key, value, np.array([True, True, False])).output
    assert last["result"] == format_matrix(output) and np.isfinite(output).all()


def done(tab) -> int:
    return int(tab.locator("#steps").input_value())


def test_by_button_and_by_keyboard(show):
    tab = show(explore.cost())
    status = tab.get_by_role("status")
    tab.keyboard.press("Tab")  # the walk: the arrow keys choose, and Space does not play
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("Space")
    assert tab.get_by_role("radio", name="every multiplication").is_checked()
    assert tab.locator("#play").text_content() == "Play"
    tab.evaluate("document.activeElement.blur()")
    tab.keyboard.press("ArrowRight")
    assert status.text_content() == (
        "step 1 of 57. Score of cats → cats: 1 · 1 = 1 Does “cats” offer what “cats” looks for? "
        "Compare them number by number. In number 0 they agree, and the match grows by 1."
    )
    for key, at in [
        ("ArrowRight", 2),
        ("Shift+ArrowRight", 3),
        ("Shift+ArrowRight", 6),
        ("ArrowLeft", 5),
        ("Shift+ArrowLeft", 3),
        ("Shift+ArrowLeft", 0),
        ("ArrowLeft", 0),
    ]:
        tab.keyboard.press(key)
        assert done(tab) == at
    assert tab.locator("#back").is_disabled()
    forward = [tab.evaluate(SHOWN)]
    for _ in range(57):
        tab.locator("#step").evaluate("node => node.click()")
        forward.append(tab.evaluate(SHOWN))
    assert tab.locator("#step").is_disabled() and tab.locator("#cell").is_disabled()
    for at in reversed(range(57)):  # stepping back shows what was there before
        tab.locator("#back").evaluate("node => node.click()")
        assert tab.evaluate(SHOWN) == forward[at]
    tab.locator("#cell").click()
    assert done(tab) == 3
    for name, at in [("Normalise", 28), ("Aggregate", 31), ("Compare", 0)]:
        tab.get_by_role("navigation").get_by_role("button", name=name).click()
        assert done(tab) == at
        assert name in tab.locator('[aria-current="step"]').text_content()
    tab.locator("#steps").fill("57")
    assert tab.evaluate(SHOWN) == forward[57]
    tab.locator("#steps").press("ArrowLeft")  # the slider's own, taken once
    assert done(tab) == 56


def until(tab, met) -> None:
    """Wait for a condition; the page's content policy forbids Playwright's own wait."""
    for _ in range(3000):
        if met():
            return
        tab.wait_for_timeout(20)
    raise AssertionError("it never came to that")


def test_playing(show):
    tab = show_products(show(explore.cost()))
    tab.locator("#speed").fill("6")
    status = tab.get_by_role("status").text_content()
    tab.locator("#play").click()
    assert tab.locator("#play").text_content() == "Pause"
    until(tab, lambda: done(tab) > 3)
    assert tab.get_by_role("status").text_content() == status  # not announced while playing
    tab.locator("#play").click()
    at = done(tab)
    assert tab.get_by_role("status").text_content().startswith(f"step {at} of 57")
    tab.wait_for_timeout(200)
    assert done(tab) == at and tab.locator("#play").text_content() == "Play"
    tab.evaluate("document.activeElement.blur()")
    tab.keyboard.press("Space")
    assert tab.locator("#play").text_content() == "Pause"
    tab.keyboard.press("ArrowLeft")  # a manual step stops it
    assert tab.locator("#play").text_content() == "Play"
    tab.locator("#steps").fill("55")
    tab.locator("#play").click()
    until(tab, lambda: tab.locator("#play").text_content() == "Play")  # at the end it stops by itself
    assert done(tab) == 57
    tab.locator("#play").click()
    assert done(tab) < 57  # and begins again
    tab.locator("#play").click()


def test_the_lengths_match_the_cost_table(show):
    tab = show(explore.cost())
    lengths = [3 * 2**power for power in range(DOUBLINGS + 1)]
    table = cost_table(lengths, d_k=3, d_v=3, dtype=np.float64)
    said = str(table).splitlines()
    rows = tab.locator("#lengths tbody tr").evaluate_all(
        "rows => rows.map((r) => [...r.cells].map((c) => c.textContent))"
    )
    assert [" ".join(" ".join(row).split()) for row in rows] == [" ".join(line.split()) for line in said[1:]]
    counts = attention_by_loops(Q, K, V).counts  # the first row is the example itself
    assert (table.rows[0].multiply_adds, table.rows[0].bytes) == (counts.multiply_adds, counts.bytes_scores)
    for place in (0, 1, 10):
        tab.locator("#length").fill(str(place))
        row = table.rows[place]
        n = f"{row.q_len:,}"
        assert (
            tab.locator("#growth-formula").text_content()
            == f"{n}² · (3 + 3) = {row.multiply_adds:,} multiply-adds"
        )
        assert tab.locator("#lengths [aria-current] th").text_content() == n
        assert tab.locator(".board").get_attribute("aria-label") == f"A board of {n} × {n} cells."
        assert tab.locator("#board-caption").text_content().startswith(f"{row.entries:,} cells")
        part = tab.evaluate(
            "() => { const area = (what) => { const b = document.querySelector(what).getBoundingClientRect();"
            " return b.width * b.height; }; return area('.before') / area('.board'); }"
        )
        assert part == pytest.approx(0.25 if place else 1, abs=0.02)


def test_the_board_has_as_many_cells_as_it_says(show):
    tab = show(explore.cost())
    tab.locator("#length").fill("2")
    size = tab.evaluate("getComputedStyle(document.querySelector('.board'), '::after').backgroundSize")
    parts = [float(part) for part in re.findall(r"([\d.]+)%", size)]  # of the board, down and across
    np.testing.assert_allclose(parts, [100 / 12] * 4, rtol=1e-5)
    tab.locator("#length").fill("10")
    assert tab.evaluate("getComputedStyle(document.querySelector('.board'), '::after').content") == "none"


def test_hostile_tokens_are_shown_as_text(show):
    numbers = np.ones((len(HOSTILE), 1))
    tab = show_products(show(explore.cost(numbers, numbers, numbers, tokens=HOSTILE)))
    names = [escape_unprintable(token) for token in HOSTILE]
    assert tab.locator("#product .left tbody th").all_text_contents() == names
    assert tab.locator("#product .right thead th").all_text_contents() == names
    for j, name in enumerate(names):
        tab.locator("#steps").fill(str(j + 1))
        assert tab.locator("#walk-title").text_content() == f"Score of {names[0]} → {name}"
    tab.get_by_role("button", name="Aggregate").click()
    assert tab.locator("#product .right tbody th").all_text_contents() == names
    assert tab.locator("script").count() == 2 and tab.locator("img").count() == 0


@pytest.mark.parametrize(("scheme", "width"), SCREENS)
def test_it_fits_and_axe_finds_no_serious_fault(show, scheme, width):
    options = {
        "viewport": {"width": width, "height": 800},
        "color_scheme": scheme,
        "reduced_motion": "reduce",
        "has_touch": width == 390,
    }
    tab = show(explore.cost(mask=regard.causal()), **options)
    button = tab.get_by_role("button", name="Step →")
    for _ in range(4):
        (button.tap if width == 390 else button.click)()
    assert "How well does “cats” fit what “like” looks for?" in tab.locator("#words").text_content()
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert faults(tab) == []
    show_products(tab)
    for at in (4, 26):  # a score, an output
        tab.locator("#steps").fill(str(at))
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        assert tab.locator("#product .scroll").evaluate("box => box.scrollWidth <= box.clientWidth")
        assert faults(tab) == []
    assert tab.evaluate("document.getAnimations().length") == 0


def test_a_wide_product_is_followed_sideways(show):
    options = {"viewport": {"width": 390, "height": 800}, "reduced_motion": "reduce"}
    tab = show_products(show(explore.cost(cat.Q, cat.K, cat.V), **options))
    in_view = """() => {
      const place = (what) => document.querySelector(what).getBoundingClientRect();
      const [cell, box] = [".at-work", "#product .scroll"].map(place);
      return cell.left >= box.left - 1 && cell.right <= box.right + 1;
    }"""
    top = tab.evaluate("scrollY")
    for at in (1, 20, 21, 100, 1):
        tab.locator("#steps").evaluate(
            "(s, at) => { s.value = at; s.dispatchEvent(new Event('input')); }", at
        )
        assert tab.evaluate(in_view)
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390
    assert tab.evaluate("scrollY") == top


def test_the_largest_stays_below_300_kb():
    x = np.random.default_rng(0).normal(size=(5, 20))
    assert 5 * 5 * (20 + 20) == MAX_MULTIPLICATIONS
    assert len(explore.cost(x, x, x).html.encode()) <= 300_000


def test_the_events_count_as_the_loops_do():
    rng = np.random.default_rng(2)
    Q, K, V = rng.normal(size=(3, 2)), rng.normal(size=(5, 2)), rng.normal(size=(5, 3))
    for seen in (np.ones((3, 5), bool), rng.random((3, 5)) < 0.6, np.zeros((3, 5), bool)):
        counts = attention_by_loops(Q, K, V, seen).counts
        assert list_events(Q, K, V, seen)[-1][5:] == [getattr(counts, name) for name in COUNTERS]
    arithmetic = {field.name for field in fields(counts) if not field.name.startswith("bytes")}
    assert set(COUNTERS) == arithmetic


def test_tensors_make_the_same_page():
    torch = pytest.importorskip("torch")
    tensors = [torch.tensor(np.array(x), requires_grad=True) for x in (Q, K, V)]
    assert explore.cost(*tensors, tokens=three_by_three.tokens).html == explore.cost().html


# -- Refused arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (dict(query=Q), "a query without a key"),
        (dict(query=Q, key=K), "a query and a key without a value; expected query, key and value"),
        (dict(query=Q, key=K, value=V[None]), "value with 3 axes"),
        (dict(tokens=["a"]), "1 tokens; expected 3"),
        (
            dict(query=np.ones((5, 9)), key=np.ones((5, 9)), value=np.ones((5, 32))),
            "1025 multiplications to go through",
        ),
    ],
)
def test_cost_refuses(arguments, words):
    with pytest.raises(regard.ArgumentError, match=re.escape(words)):
        explore.cost(**arguments)


# -- The bytes that are moved -----------------------------------------------------------------------------


def test_every_place_of_the_sliders_counts_the_bytes_of_the_library(show):
    tab = show(explore.memory())
    for i, j, k in [(0, 0, 0), (3, 1, 3), (9, 3, 5), (1, 2, 4), (9, 0, 0), (0, 3, 5)]:
        for name, place in (("n", i), ("d", j), ("rows", k)):
            tab.locator(f"#{name}").fill(str(place))
        n, d, rows = 2 ** (8 + i), 2 ** (5 + j), 2 ** (4 + k)
        cost = Cost(n, n, d, d, itemsize=2)
        for table_id, total in (("textbook", cost.bytes_moved), ("fused", cost.bytes_moved_fused(rows))):
            shown = [
                int(text.replace(",", ""))
                for text in tab.locator(f"#{table_id} td:nth-child(2)").all_inner_texts()
            ]
            assert shown[-1] == sum(shown[:-1]) == total
        assert tab.locator("#ratio").inner_text() == format_number(
            cost.bytes_moved / cost.bytes_moved_fused(rows)
        )
        tile = 2 * (rows * d + 2 * 128 * d) + 4 * (rows * 128 + rows * d)  # float32 scores and output
        assert tab.locator("#tile").inner_text() == f"{tile:,}"
        assert ("does not fit" in tab.locator("#verdict").inner_text()) == (tile > 196_608)


@pytest.mark.parametrize(("scheme", "width"), SCREENS)
def test_the_count_of_bytes_fits_and_axe_finds_no_serious_fault(show, scheme, width):
    tab = show(explore.memory(), viewport={"width": width, "height": 844}, color_scheme=scheme)
    tab.locator("#n").focus()
    tab.keyboard.press("End")
    tab.locator("#verdict").wait_for()
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert faults(tab) == []
