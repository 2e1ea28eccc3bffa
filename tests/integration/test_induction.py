"""The trained models of examples/induction: the kept ones do what is claimed of them, and more can be trained."""

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
    Config,
    Model,
    baselines,
    data,
    decode,
    encode,
    load,
    model,
    repeats,
    save,
    train,
)
from examples.induction.data import Text
from examples.induction.model import HERE

FRESH = 20_261_115  # neither the seed of the training nor of what was measured on the way
MOST = {"induction": 3e6, "text": 10e6}


@pytest.fixture(scope="module")
def trained():
    return load()


@pytest.fixture(scope="module")
def writer():
    return load("text")


# -- Sequences with a repeat ------------------------------------------------------------------------------


def test_the_second_copy_is_the_first_and_source_is_the_token_after():
    found = repeats(50, FRESH)
    for tokens, first, second, source in zip(*found, strict=True):
        assert torch.equal(tokens[first], tokens[second])
        assert not (first & second).any()
        rows = torch.nonzero(source >= 0).flatten()
        assert len(rows) == first.sum() - 1
        assert torch.equal(tokens[source[rows]], tokens[rows + 1])
        assert torch.equal(tokens[source[rows] - 1], tokens[rows])
        assert (source[rows] <= rows).all()


def test_neither_distance_nor_place_gives_the_repeat_away():
    found = repeats(200, FRESH)
    begins = [
        [int(torch.nonzero(copy).min()) for copy in copies]
        for copies in zip(found.first, found.second, strict=True)
    ]
    assert len({second - first for first, second in begins}) > 25
    assert len({first for first, _ in begins}) > 15
    assert len({int(size) for size in found.first.sum(1)}) == 32 - 12 + 1
    assert torch.equal(repeats(200, FRESH).tokens, found.tokens)
    assert not torch.equal(repeats(200, FRESH + 1).tokens, found.tokens)


# -- The kept checkpoints ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MOST)
def test_checkpoint_is_small_halves_with_their_sizes_and_figures(name):
    from safetensors import safe_open

    path = HERE / f"{name}.safetensors"
    assert path.stat().st_size < MOST[name]
    with safe_open(path, "pt") as file:
        kept = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a dict
        header = {key: json.loads(text) for key, text in file.metadata().items()}
    assert {tensor.dtype for tensor in kept.values()} == {torch.float16}
    loaded = load(name)
    assert kept.keys() == loaded.state_dict().keys()
    assert Config(**header["config"]) == loaded.config
    assert loaded.about == header["about"] and loaded.about["task"] == name
    assert loaded.about["steps"] == train.TASKS[name].steps and loaded.config == train.TASKS[name].config
    assert not loaded.training and not any(p.requires_grad for p in loaded.parameters())


def test_a_checkpoint_that_is_not_whole_is_refused(tmp_path, trained):
    broken = Model(trained.config)
    del broken.layers[1].norm
    save(broken, tmp_path / "broken.safetensors")
    with pytest.raises(RuntimeError, match=r"Missing key.*layers\.1\.norm"):
        load(tmp_path / "broken.safetensors")


def test_save_and_load_give_the_same_halves(tmp_path, trained):
    save(trained, tmp_path / "again.safetensors", trained.about)
    again = load(tmp_path / "again.safetensors")
    assert again.about == trained.about
    for name, tensor in trained.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])


# -- What the induction model does ------------------------------------------------------------------------


def test_loss_on_the_repeat_is_below_a_fifth_and_a_head_looks_at_the_token_after(trained):
    assert (trained.config.layers, trained.config.hidden) == (2, 0)
    found = train.induction(trained, seed=FRESH, batch=128)
    assert train.amiss(found) == []
    assert found["second"] < found["first"] / 5
    assert max(found["heads"]) > 1 / 2
    # And not by much other than what was written down with the checkpoint.
    assert found["second"] / found["first"] == pytest.approx(
        trained.about["second"] / trained.about["first"], rel=0.2
    )
    assert found["heads"] == pytest.approx(trained.about["heads"], abs=0.05)


def test_the_figures_of_a_head_are_those_of_the_dense_matrix(trained):
    fresh = repeats(5, FRESH)
    _, matrices = trained(fresh.tokens, need_matrices=True)
    rows = [(b, i, j) for b, line in enumerate(fresh.source.tolist()) for i, j in enumerate(line) if j >= 0]
    dense = matrices[-1].to_dense()
    by_hand = torch.stack([dense[b, :, i, j] for b, i, j in rows]).mean(0)
    assert train.induction(trained, seed=FRESH, batch=5)["heads"] == pytest.approx(by_hand.tolist(), abs=1e-4)


def test_without_a_repeat_there_is_nothing_to_gain(trained):
    tokens = torch.randint(
        trained.config.vocabulary, (64, 64), generator=torch.Generator().manual_seed(FRESH)
    )
    loss = torch.nn.functional.cross_entropy(trained(tokens)[:, :-1].mT, tokens[:, 1:])
    assert loss > 0.98 * torch.tensor(float(trained.config.vocabulary)).log()


def test_claims_can_fail():
    untrained = Model(train.TASKS["induction"].config).eval()
    wrong = train.amiss(train.induction(untrained, seed=FRESH))
    assert len(wrong) == 2
    assert "not below a fifth" in wrong[0] and "no head of the last layer" in wrong[1]


def test_it_goes_on_with_what_it_has_seen(trained):
    block = torch.randperm(trained.config.vocabulary, generator=torch.Generator().manual_seed(FRESH))[
        None, :24
    ]
    prompt = torch.cat([block, block[:, :4]], 1)
    assert (trained.extend(prompt, 16)[:, 28:] == block[:, 4:20]).float().mean() > 0.8


def test_caches_give_the_logits_of_the_whole_sequence(trained):
    tokens = repeats(2, FRESH).tokens
    caches = trained.caches()
    pieces = [trained(part, caches=caches) for part in tokens.split([30, 1, 33], 1)]
    torch.testing.assert_close(torch.cat(pieces, 1), trained(tokens), atol=1e-4, rtol=1e-4)


# -- What the text model does -----------------------------------------------------------------------------


def test_text_model_beats_zlib(writer):
    assert train.text_amiss(writer.about) == []
    assert writer.about["bits"]["model"] < writer.about["bits"]["zlib"]
    worse = {"bits": writer.about["bits"] | {"model": 8.0}}
    assert "8.000 bits for each byte, not below" in train.text_amiss(worse)[0]


def test_tokens_are_bytes():
    assert decode(encode("π is a letter")) == "π is a letter"
    assert encode("ab").tolist() == [[97, 98]]


@pytest.mark.slow
def test_text_model_gives_the_bits_that_were_written_down(writer):
    """On the standard library it was measured with; on another one the text is another."""
    read = train.read()
    if train.fingerprint(read) != writer.about["text"]["sha256"]:
        pytest.skip("another Python, another text")
    assert train.bits(writer, read.held_out) == pytest.approx(writer.about["bits"]["model"], abs=1e-3)


# -- Training, for a few steps ----------------------------------------------------------------------------


@pytest.mark.slow
def test_an_induction_head_grows_in_seconds():
    """The same model and the same training on a smaller question: 32 tokens, short sequences."""
    sizes = {"vocabulary": 32, "length": 24, "block": (9, 12)}
    task = replace(
        train.TASKS["induction"],
        config=Config(vocabulary=32, width=32, heads=2, layers=2),
        rate=1e-2,
        every=1000,
        batch=lambda generator: repeats(32, generator, **sizes).tokens,
        measure=lambda model: train.induction(model, **sizes),
    )
    _, (begun, ended) = train.train(task, 200, seed=FRESH)
    assert begun["second"] == pytest.approx(begun["first"], rel=0.05)
    assert ended["second"] < 0.8 * ended["first"]
    assert max(ended["heads"]) > 3 * max(begun["heads"])


def test_the_same_seed_gives_the_same_model():
    def weights(seed):
        learnt, _ = train.train(replace(train.TASKS["induction"], measure=lambda model: {}), 3, seed)
        return torch.cat([p.detach().flatten() for p in learnt.parameters()])

    assert torch.equal(weights(5), weights(5))
    assert not torch.equal(weights(5), weights(6))


def test_the_script_trains_saves_draws_and_says_what_is_not_reached(tmp_path, capsys):
    threads = torch.get_num_threads()
    try:
        assert (
            train.main(["induction", "--steps", "2", "--threads", str(threads), "--out", str(tmp_path)]) == 2
        )
    finally:
        torch.set_num_threads(threads)
    said = capsys.readouterr()
    assert "2 of 2" in said.err and "not below a fifth" in said.err
    assert load(tmp_path / "induction.safetensors").about["steps"] == 2
    assert "</svg>" in (tmp_path / "induction-loss.svg").read_text()


# -- The text, and what it costs without a model ----------------------------------------------------------


@pytest.mark.slow
def test_no_paragraph_is_in_both_parts_of_the_text_or_twice_in_one():
    train_parts, held_parts = (
        [p.strip() for p in part.decode().split("\n\n") if p.strip()] for part in train.read()
    )
    assert len(set(train_parts)) == len(train_parts) and len(set(held_parts)) == len(held_parts)
    assert set(train_parts).isdisjoint(held_parts)
    assert len(train.read().train) > 10 * len(train.read().held_out) > 10 * 10_000


def test_counting_knows_what_it_has_seen_and_nothing_else():
    assert baselines.by_counting(Text(b"the cat sat on the mat. " * 20, b"the cat sat on the mat")) < 0.3
    assert baselines.by_counting(Text(b"a" * 100, b"\x00\xff" * 20)) > 8
    assert baselines.by_xz(Text(bytes(range(256)) * 40, bytes(range(256)) * 40)) < 0.2
    assert baselines.by_zlib(Text(b"", b"ab" * 5000)) < 0.1


def test_the_blocks_of_the_readme_run():
    assert run_page((HERE / "README.md").read_text(), "examples/induction/README.md") > 0


@pytest.mark.parametrize("module", [model, data, baselines, sys.modules["examples.induction"]])
def test_examples_of_the_docstrings_run(module):
    assert doctest.testmod(module, optionflags=doctest.ELLIPSIS).failed == 0
