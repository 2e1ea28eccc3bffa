"""The model of children's stories: the stored one is worth reading, and its training resumes and repeats."""

from __future__ import annotations

import doctest

import pytest
import torch

pytest.importorskip("safetensors")
pytest.importorskip("matplotlib")

from examples import stories
from examples.induction import decode, encode
from examples.induction.data import TextSplit
from examples.induction.model import Config
from examples.induction.train import measure_bits
from examples.stories import data, muon, train
from examples.stories.muon import orthogonalise
from examples.stories.train import Trainer

TINY = Config(vocabulary=256, width=16, heads=2, layers=2, hidden=32, activation="relu2")
TEXT = TextSplit(b"The cat sat on the mat. The dog sat on the log.\n" * 40, b"The cat sat on the log.\n" * 40)
STORY = b"""One day, a boy named Ben went to the park with his mom. He saw a big tree and wanted to climb it.
"Be careful, Ben," said his mom. Ben was happy. He climbed up and saw a little bird. The bird was sad.
"Why are you sad?" asked Ben. "I lost my red ball," said the bird. Ben helped the bird, and they found it.
"""  # written for this test


@pytest.fixture(scope="module")
def model():
    return stories.load_stories()


def test_checkpoint_is_small_and_says_how_it_was_trained(model):
    assert stories.CHECKPOINT.stat().st_size < 4e6
    about = model.about
    assert {
        "steps",
        "seed",
        "batch",
        "context",
        "seconds",
        "cpu_seconds",
        "bits",
        "text",
        "seen",
    } <= about.keys()
    assert len(about["text"]["sha256"]) == 64 and about["history"][-1]["step"] == about["steps"]
    losses = [figures["held out"] for figures in about["history"] if "held out" in figures]
    assert losses[0] > 7.9 and losses[-1] < losses[0] / 4


def test_model_predicts_stories_better_than_counting_and_zlib(model):
    bits = model.about["bits"]
    assert bits["model"] < bits["zlib"]
    assert measure_bits(model, STORY, 64) < bits["zlib"]  # a text that it cannot have seen
    assert measure_bits(model, bytes(reversed(STORY)), 64) > 2 * bits["counting"]


def test_model_writes_words_of_the_stories(model):
    written = decode(
        model.generate(encode("Once upon a time, there was a little girl named Lily. One day, Li"), 40)
    )
    assert written[len("Once upon a time, there was a little girl named Lily. One day, ") :].startswith(
        "Lily "
    )
    assert written.isascii()


def test_training_resumes_to_the_same_bits(tmp_path):
    whole, first, second = (Trainer(TEXT, config=TINY, batch=2) for _ in range(3))
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
    for step in range(851):
        assert train.rate_factor(step, 1000) == train.rate_factor(step, 5000)
    assert train.rate_factor(900, 1000) < train.rate_factor(900, 5000)
    assert 0 < train.rate_factor(999, 1000) < 0.01


def test_a_short_training_learns(tmp_path):
    trainer = Trainer(TEXT, config=TINY, batch=4)
    before = trainer.train_step(60)
    for _ in range(59):
        after = trainer.train_step(60)
    assert after < before - 2
    about = train.describe(trainer.model, trainer, seed=0)
    assert about["steps"] == 60 and about["seen"][0] == ord(" ")


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


@pytest.mark.parametrize("module", [stories, data, muon, train])
def test_docstring_examples_run(module):
    assert doctest.testmod(module, optionflags=doctest.ELLIPSIS).failed == 0
