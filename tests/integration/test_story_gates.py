"""What the model of children's stories has learned, on sentences that were not in its training text.

The gates are those of the book's last chapter: it looks back at a name that was mentioned, and cannot know one that was
not; the heads that look at the name are what copies it.
"""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch

pytest.importorskip("safetensors")

from examples.stories.grammar import (
    BOYS,
    CODE_TEMPLATES,
    GIRLS,
    NAME_TEMPLATES,
    OTHER_TEMPLATES,
    draw_made_up_name,
    draw_slots,
    fill,
    is_held_out,
    is_held_out_name,
)
from regard import intervene
from regard.interventions import ablate
from regard.learn import TinyGPT
from regard.learn.gpt import load_stories

SENTENCES, MADE_UP = 200, 50
WORDS = ["sun", "tree", "song"]


@pytest.fixture(scope="module")
def gpt():
    return TinyGPT()


@pytest.fixture(scope="module")
def model():
    return load_stories()[0]


def draw_cases():
    """Draw sentences that end before a name, the same with another name, and the name; the first have made-up names."""
    rng, cases = Random(77), []
    while len(cases) < SENTENCES:
        template, slots = rng.choice(NAME_TEMPLATES), draw_slots(rng, WORDS)
        names = GIRLS if slots["S"] == "She" else BOYS
        is_made_up = len(cases) < MADE_UP
        name = draw_made_up_name(rng) if is_made_up else rng.choice(names)
        if not (is_held_out_name(name) if is_made_up else is_held_out(template, name)):
            continue
        other = rng.choice([other for other in names if other != name])
        begin, without = (
            text[: text.rindex("|")].replace("|", "").rstrip()
            for text in (fill(template, slots | {"N": name}), fill(template, slots | {"N": other}))
        )
        cases.append((begin, without, name))
    return cases


@pytest.fixture(scope="module")
def cases(gpt):
    """Each case as tokens: the sentence, the sentence with another name, the name, and the places of the name."""
    found = []
    for begin, without, name in draw_cases():
        tokens, wanted = gpt.encode(begin), gpt.encode(name)[1:]
        places = [
            at + i
            for at in range(len(tokens) - len(wanted) + 1)
            if tokens[at : at + len(wanted)] == wanted
            for i in range(len(wanted))
        ]
        assert places, (begin, name)
        found.append((tokens, gpt.encode(without), wanted, places))
    return found


def guess(model, tokens):
    """Return the most likely next token, and the weights of the last row, (layers, heads, n)."""
    logits, matrices = model(torch.tensor([tokens]), need_matrices=True)
    return int(logits[0, -1].argmax()), torch.stack([A[0, :, -1] for A in matrices]).numpy()


@pytest.fixture(scope="module")
def results(model, cases):
    return [guess(model, tokens) for tokens, _, _, _ in cases]


def find_name_heads(cases, results):
    """Return the heads that put more than half of their weight on the name, in the mean over the sentences."""
    on_name = np.mean(
        [
            weights[..., places].sum(-1)
            for (_, _, _, places), (_, weights) in zip(cases, results, strict=True)
        ],
        0,
    )
    return [tuple(map(int, head)) for head in np.argwhere(on_name > 0.5)], on_name


def test_the_name_that_was_mentioned_is_the_first_guess(cases, results):
    right = [token == wanted[0] for (_, _, wanted, _), (token, _) in zip(cases, results, strict=True)]
    assert np.mean(right) >= 0.9 and np.mean(right[:MADE_UP]) >= 0.9


def test_a_name_that_was_not_mentioned_is_not(model, cases):
    found = [guess(model, without)[0] == wanted[0] for _, without, wanted, _ in cases]
    assert np.mean(found) <= 0.1


def test_without_the_heads_that_look_at_the_name_it_is_not_guessed(model, cases, results):
    heads, on_name = find_name_heads(cases, results)
    assert heads and all(on_name[head] > 0.5 for head in heads)
    off = [ablate(layer, heads=head) for layer, head in heads]
    with intervene(model, off):
        right = [
            int(model(torch.tensor([tokens]))[0, -1].argmax()) == wanted[0] for tokens, _, wanted, _ in cases
        ]
    assert np.mean(right) < 0.3


def test_heads_for_the_previous_token_the_first_token_and_induction(gpt, model):
    # Words without order, said twice: what a head does then is its habit, not the text's.
    words = [
        number
        for number, piece in enumerate(gpt.pieces)
        if piece[0] == " " and piece[1:].isalpha() and len(piece) > 3
    ]
    rng = np.random.default_rng(1)
    said = np.stack([rng.choice(words, 40, replace=False) for _ in range(8)])
    tokens = torch.tensor(np.concatenate([np.zeros((8, 1), int), said, said], 1))
    _, matrices = model(tokens, need_matrices=True)
    weights = torch.stack([A.to_dense() for A in matrices], 1).mean(0)  # (layers, heads, n, n)
    all_rows, new, again = torch.arange(1, 81), torch.arange(5, 41), torch.arange(41, 81)
    scores = {
        "previous token": weights[..., all_rows, all_rows - 1].mean(-1).max(),
        "first token, where nothing can be copied": weights[..., new, 0].mean(-1).max(),
        "induction": weights[..., again, again - 39].mean(-1).max(),
    }
    assert all(score > 0.5 for score in scores.values()), scores


@pytest.mark.parametrize("template", [template for template in OTHER_TEMPLATES if "{j}" in template])
def test_what_one_of_two_had_decides_who_it_was(gpt, template):
    rng, right = Random(5), []
    while len(right) < 25:
        slots = draw_slots(rng, WORDS)
        if is_held_out(template, f"{slots['j']} {slots['i']}"):
            begin, answer = fill(template, slots).rstrip(".").split("|")
            right.append(gpt(begin.rstrip()).best(1)[0][0] == f" {answer}")
    assert np.mean(right) >= 0.8


def test_a_name_of_a_program_is_found_again(gpt):
    rng, right = Random(6), []
    for _ in range(50):
        begin, answer = fill(CODE_TEMPLATES[1], draw_slots(rng, WORDS)).split("|")
        right.append(answer.startswith(gpt(begin).best(1)[0][0]))
    assert np.mean(right) >= 0.8


def test_the_cat_sat_on_the_mat(gpt):
    assert gpt("The cat sat on the").best(1)[0][0] == " mat"


def test_it_predicts_text_better_than_a_model_of_letters(gpt):
    # The model of bytes that it replaced needed 1.325 bits for each byte of the same held-out text.
    assert gpt.about["bits"]["model"] < 1.325
