"""The model of children's stories: the stored one is worth reading, and its training resumes and repeats."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("safetensors")
pytest.importorskip("matplotlib")

from examples.induction.data import TextSplit
from examples.stories import data, grammar, muon, pieces, train
from examples.stories.muon import orthogonalise
from examples.stories.train import StoryText, Trainer
from regard.learn import TinyGPT, tiny_gpt
from regard.learn.gpt import GPTConfig, load_stories

TINY = GPTConfig(vocabulary=160, width=16, heads=2, layers=2, hidden=32, activation="relu2")
LINES = TextSplit(
    b"The cat sat on the mat. The dog sat on the log.\n" * 40, b"The cat sat on the log.\n" * 40
)
TEXT = StoryText(LINES, 160, made_stories=40, seed=0)
STORY = """One day, a boy named Ben went to the park with his mom. He saw a big tree and wanted to climb it.
"Be careful, Ben," said his mom. Ben was happy. He climbed up and saw a little bird. The bird was sad.
"Why are you sad?" asked Ben. "I lost my red ball," said the bird. Ben helped the bird, and they found it.
"""  # written for this test


def build_trainer(batch=(1, 0, 1)):
    return Trainer(TEXT, config=TINY, batch=batch, context=24)


@pytest.fixture(scope="module")
def model():
    return load_stories()[0]


def test_checkpoint_is_small_and_says_how_it_was_trained(model):
    assert Path(tiny_gpt.__file__).with_name(tiny_gpt.STORED_MODEL).stat().st_size < 4.2e6
    about = model.about
    assert {"steps", "seed", "batch", "context", "seconds", "cpu_seconds", "bits", "text"} <= about.keys()
    assert len(about["text"]["sha256"]) == 64 and about["history"][-1]["step"] == about["steps"]
    losses = [figures["held out"] for figures in about["history"] if "held out" in figures]
    assert losses[-1] < losses[0] / 2


def measure_story(gpt, text):
    run = gpt(text)
    return -np.log2(run.guesses[-1, np.arange(len(run.tokens) - 1), run.tokens[1:]]).sum() / len(text)


def test_model_predicts_stories_better_than_counting_and_zlib():
    gpt = TinyGPT()
    bits = gpt.about["bits"]
    assert bits["model"] < bits["counting"] < bits["zlib"]
    assert measure_story(gpt, STORY) < bits["counting"]  # a text that it cannot have seen
    assert measure_story(gpt, STORY[::-1]) > 2 * bits["counting"]


def test_the_stored_numbers_are_the_rounded_ones(tmp_path):
    trainer = build_trainer()
    with torch.no_grad():
        trainer.model.layers[0].attention.q_proj.weight[3] = 0  # a row without a factor
    train.store(trainer.model, TEXT.pieces, tmp_path / "model", train.describe_run(trainer, 0))
    stored = load_stories(tmp_path / "model")[0].state_dict()
    for name, weight in trainer.model.state_dict().items():
        room = weight.abs().amax(-1, keepdim=True) / 200 if weight.dim() == 2 else weight.abs() * 2**-11
        assert ((stored[name] - weight).abs() <= room + 1e-7).all(), name


def test_held_out_names_and_pairs_are_not_in_the_training_text():
    told = grammar.draw_stories(3000, 1, ["sun", "tree"])
    made_up = rf"\b[{grammar.STARTS}][aeiou][bdklmnprtvxz][aeiou][bdklmnprtvxz]?\b"
    found = {word for story in told for word in re.findall(made_up, story)}
    assert len(found) > 500 and not any(map(grammar.is_held_out_name, found))
    names = {*grammar.GIRLS, *grammar.BOYS}
    template = "A {k} named {N} found a {c} {t} in the {p}. The {c} {t} now belongs to |{N}."
    assert template in grammar.NAME_TEMPLATES
    found = {match[1] for story in told for match in re.finditer(r"A \w+ named (\w+) found an? ", story)}
    assert len(found & names) > 20 and not any(grammar.is_held_out(template, name) for name in found & names)
    assert not any("cat sat on the mat" in story for story in told)


def test_persons_are_renamed_alike():
    text = "Lily saw Tom. Tom saw Lily.\n" * 3
    renamed = grammar.rename(text, 0)
    lily, tom = re.match(r"(\w+) saw (\w+)\.", renamed).groups()
    assert renamed == text.replace("Lily", lily).replace("Tom", tom) and lily != tom != "Tom"


def test_training_resumes_to_the_same_bits(tmp_path):
    whole, first, second = (build_trainer() for _ in range(3))
    for _ in range(6):
        whole.train_step(8)
    for _ in range(3):
        first.train_step(8)
    torch.save(first.state(), tmp_path / "state")
    second.restore(torch.load(tmp_path / "state"))
    for _ in range(3):
        second.train_step(8)
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, second.model.state_dict()[name]), name


def test_a_longer_run_can_end_early_as_a_short_one():
    # Until the rates of the short run fall, both are the same.
    for step in range(801):
        assert train.rate_factor(step, 1000) == train.rate_factor(step, 5000)
    assert train.rate_factor(900, 1000) < train.rate_factor(900, 5000)
    assert 0 < train.rate_factor(999, 1000) < 0.01


def test_a_short_training_learns(tmp_path):
    trainer = build_trainer(batch=(4, 0, 0))
    before = trainer.train_step(60)
    for _ in range(59):
        after = trainer.train_step(60)
    assert after < before - 2
    about = train.describe(trainer.model, trainer, seed=0)
    assert about["steps"] == 60 and 0 < about["bits"]["model"] < 3


def test_orthogonalise_gives_singular_values_near_one():
    torch.manual_seed(0)
    for shape in ((3, 8, 8), (2, 8, 20), (2, 20, 8)):
        sizes = torch.linalg.svdvals(orthogonalise(torch.randn(shape)))
        assert sizes.min() > 0.6 and sizes.max() < 1.3


def test_another_text_is_refused(tmp_path):
    for name in data.SOURCES:
        (tmp_path / name).write_text("Once upon a time")
    with pytest.raises(ValueError, match=r"stories-a\.txt has the SHA-256 [0-9a-f]{64}, not 5a19"):
        data.read_stories(tmp_path)


@pytest.mark.parametrize("module", [data, grammar, muon, pieces, train])
def test_docstring_examples_run(module):
    assert doctest.testmod(module, optionflags=doctest.ELLIPSIS).failed == 0
