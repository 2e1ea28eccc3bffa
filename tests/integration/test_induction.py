"""The trained models of examples/induction: the stored ones meet the claims, and training works."""

from __future__ import annotations

import doctest
import json
import sys
from dataclasses import replace

import pytest
import torch

from tests.helpers.doc_blocks import run_page

pytest.importorskip("safetensors")
pytest.importorskip("matplotlib")

from examples.induction import (
    baselines,
    data,
    decode,
    draw_repeats,
    encode,
    load,
    model,
    save,
    train,
)
from examples.induction.data import TextSplit
from examples.induction.model import HERE
from regard.learn.gpt import GPT, GPTConfig

NEW_SEED = 20_261_115  # not used in training or for measurements during training
MAX_BYTES = {"induction": 3e6, "text": 10e6}


@pytest.fixture(scope="module")
def trained():
    return load()


@pytest.fixture(scope="module")
def text_model():
    return load("text")


# -- Sequences with a repeat ------------------------------------------------------------------------------


def test_the_second_copy_is_the_first_and_source_is_the_token_after():
    found = draw_repeats(50, NEW_SEED)
    for tokens, first, second, source in zip(*found, strict=True):
        assert torch.equal(tokens[first], tokens[second])
        assert not (first & second).any()
        rows = torch.nonzero(source >= 0).flatten()
        assert len(rows) == first.sum() - 1
        assert torch.equal(tokens[source[rows]], tokens[rows + 1])
        assert torch.equal(tokens[source[rows] - 1], tokens[rows])
        assert (source[rows] <= rows).all()


def test_neither_distance_nor_position_gives_the_repeat_away():
    found = draw_repeats(200, NEW_SEED)
    begins = [
        [int(torch.nonzero(copy).min()) for copy in copies]
        for copies in zip(found.first, found.second, strict=True)
    ]
    assert len({second - first for first, second in begins}) > 25
    assert len({first for first, _ in begins}) > 15
    assert len({int(size) for size in found.first.sum(1)}) == 32 - 12 + 1
    assert torch.equal(draw_repeats(200, NEW_SEED).tokens, found.tokens)
    assert not torch.equal(draw_repeats(200, NEW_SEED + 1).tokens, found.tokens)


# -- The stored checkpoints -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MAX_BYTES)
def test_checkpoint_is_small_float16_with_config_and_figures(name):
    from safetensors import safe_open

    path = HERE / f"{name}.safetensors"
    assert path.stat().st_size < MAX_BYTES[name]
    with safe_open(path, "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a dict
        header = {key: json.loads(text) for key, text in file.metadata().items()}
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float16}
    loaded = load(name)
    assert tensors.keys() == loaded.state_dict().keys()
    assert GPTConfig(**header["config"]) == loaded.config
    assert loaded.about == header["about"] and loaded.about["task"] == name
    assert loaded.about["steps"] == train.TASKS[name].steps and loaded.config == train.TASKS[name].config
    assert not loaded.training and not any(p.requires_grad for p in loaded.parameters())


def test_an_incomplete_checkpoint_raises(tmp_path, trained):
    broken = GPT(trained.config)
    del broken.layers[1].norm
    save(broken, tmp_path / "broken.safetensors")
    with pytest.raises(RuntimeError, match=r"Missing key.*layers\.1\.norm"):
        load(tmp_path / "broken.safetensors")


def test_save_and_load_round_trip(tmp_path, trained):
    save(trained, tmp_path / "again.safetensors", trained.about)
    again = load(tmp_path / "again.safetensors")
    assert again.about == trained.about
    for name, tensor in trained.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])


# -- What the induction model does ------------------------------------------------------------------------


def test_loss_on_the_repeat_is_below_a_fifth_and_a_head_attends_to_the_token_after(trained):
    assert (trained.config.layers, trained.config.hidden) == (2, 0)
    found = train.measure_induction(trained, seed=NEW_SEED, batch=128)
    assert train.find_induction_failures(found) == []
    assert found["second"] < found["first"] / 5
    assert max(found["heads"]) > 1 / 2
    # And close to the figures stored with the checkpoint.
    assert found["second"] / found["first"] == pytest.approx(
        trained.about["second"] / trained.about["first"], rel=0.2
    )
    assert found["heads"] == pytest.approx(trained.about["heads"], abs=0.05)


def test_figures_of_a_head_agree_with_the_dense_matrix(trained):
    fresh = draw_repeats(5, NEW_SEED)
    _, matrices = trained(fresh.tokens, need_matrices=True)
    rows = [(b, i, j) for b, line in enumerate(fresh.source.tolist()) for i, j in enumerate(line) if j >= 0]
    dense = matrices[-1].to_dense()
    by_hand = torch.stack([dense[b, :, i, j] for b, i, j in rows]).mean(0)
    assert train.measure_induction(trained, seed=NEW_SEED, batch=5)["heads"] == pytest.approx(
        by_hand.tolist(), abs=1e-4
    )


def test_without_a_repeat_the_model_only_guesses(trained):
    tokens = torch.randint(
        trained.config.vocabulary, (64, 64), generator=torch.Generator().manual_seed(NEW_SEED)
    )
    loss = torch.nn.functional.cross_entropy(trained(tokens)[:, :-1].mT, tokens[:, 1:])
    assert loss > 0.98 * torch.tensor(float(trained.config.vocabulary)).log()


def test_claims_can_fail():
    untrained = GPT(train.TASKS["induction"].config).eval()
    failures = train.find_induction_failures(train.measure_induction(untrained, seed=NEW_SEED))
    assert len(failures) == 2
    assert "not below a fifth" in failures[0] and "No head of the last layer" in failures[1]


def test_generation_repeats_the_block(trained):
    block = torch.randperm(trained.config.vocabulary, generator=torch.Generator().manual_seed(NEW_SEED))[
        None, :24
    ]
    prompt = torch.cat([block, block[:, :4]], 1)
    assert (trained.generate(prompt, 16)[:, 28:] == block[:, 4:20]).float().mean() > 0.8


def test_caches_give_the_logits_of_the_whole_sequence(trained):
    tokens = draw_repeats(2, NEW_SEED).tokens
    caches = trained.build_caches()
    pieces = [trained(part, caches=caches) for part in tokens.split([30, 1, 33], 1)]
    torch.testing.assert_close(torch.cat(pieces, 1), trained(tokens), atol=1e-4, rtol=1e-4)


# -- What the text model does -----------------------------------------------------------------------------


def test_text_model_beats_zlib(text_model):
    assert train.find_text_failures(text_model.about) == []
    assert text_model.about["bits"]["model"] < text_model.about["bits"]["zlib"]
    worse = {"bits": text_model.about["bits"] | {"model": 8.0}}
    assert "8.000 bits per byte, not below" in train.find_text_failures(worse)[0]


def test_tokens_are_bytes():
    assert decode(encode("π is a letter")) == "π is a letter"
    assert encode("ab").tolist() == [[97, 98]]


@pytest.mark.nightly
@pytest.mark.slow
def test_text_model_has_the_stored_loss(text_model):
    """Only with the standard library it was measured on: another version has another text."""
    text = train.load_text()
    if train.hash_text(text) != text_model.about["text"]["sha256"]:
        pytest.skip("this Python version has another text")
    assert train.measure_bits(text_model, text.held_out) == pytest.approx(
        text_model.about["bits"]["model"], abs=1e-3
    )


# -- Training, for a few steps ----------------------------------------------------------------------------


@pytest.mark.slow
def test_an_induction_head_emerges_in_a_short_training():
    """Train the model on a smaller task: 32 different tokens and short sequences."""
    sizes = {"vocabulary": 32, "length": 24, "block": (9, 12)}
    task = replace(
        train.TASKS["induction"],
        config=GPTConfig(vocabulary=32, width=32, heads=2, layers=2),
        rate=1e-2,
        every=1000,
        draw_batch=lambda generator: draw_repeats(32, generator, **sizes).tokens,
        measure=lambda model: train.measure_induction(model, **sizes),
    )
    _, (start, end) = train.train(task, 200, seed=NEW_SEED)
    assert start["second"] == pytest.approx(start["first"], rel=0.05)
    assert end["second"] < 0.8 * end["first"]
    assert max(end["heads"]) > 3 * max(start["heads"])


def test_the_same_seed_gives_the_same_model():
    def train_weights(seed):
        trained, _ = train.train(replace(train.TASKS["induction"], measure=lambda model: {}), 3, seed)
        return torch.cat([p.detach().flatten() for p in trained.parameters()])

    assert torch.equal(train_weights(5), train_weights(5))
    assert not torch.equal(train_weights(5), train_weights(6))


def test_the_script_trains_saves_plots_and_reports_failed_claims(tmp_path, capsys):
    threads = torch.get_num_threads()
    try:
        assert (
            train.main(["induction", "--steps", "2", "--threads", str(threads), "--out", str(tmp_path)]) == 2
        )
    finally:
        torch.set_num_threads(threads)
    captured = capsys.readouterr()
    assert "2 of 2" in captured.err and "not below a fifth" in captured.err
    assert load(tmp_path / "induction.safetensors").about["steps"] == 2
    assert "</svg>" in (tmp_path / "induction-loss.svg").read_text()


# -- The text, and its compression without a model -------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.slow
def test_no_paragraph_is_in_both_parts_of_the_text_or_twice_in_one():
    train_parts, held_parts = (
        [p.strip() for p in part.decode().split("\n\n") if p.strip()] for part in train.load_text()
    )
    assert len(set(train_parts)) == len(train_parts) and len(set(held_parts)) == len(held_parts)
    assert set(train_parts).isdisjoint(held_parts)
    assert len(train.load_text().train) > 10 * len(train.load_text().held_out) > 10 * 10_000


def test_baselines_on_seen_and_unseen_text():
    assert (
        baselines.measure_ngrams(TextSplit(b"the cat sat on the mat. " * 20, b"the cat sat on the mat")) < 0.3
    )
    assert baselines.measure_ngrams(TextSplit(b"a" * 100, b"\x00\xff" * 20)) > 8
    assert baselines.measure_xz(TextSplit(bytes(range(256)) * 40, bytes(range(256)) * 40)) < 0.2
    assert baselines.measure_zlib(TextSplit(b"", b"ab" * 5000)) < 0.1


def test_code_blocks_of_the_readme_run():
    assert run_page((HERE / "README.md").read_text(), "examples/induction/README.md") > 0


@pytest.mark.parametrize("module", [model, data, baselines, sys.modules["examples.induction"]])
def test_docstring_examples_run(module):
    assert doctest.testmod(module, optionflags=doctest.ELLIPSIS).failed == 0
