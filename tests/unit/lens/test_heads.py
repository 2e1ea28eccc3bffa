"""`Recording.heads`: every measure compared with its definition on the dense matrix, and heads of known kinds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import regard  # noqa: E402
from regard import ArgumentError, ArgumentTypeError  # noqa: E402
from regard.lens import Table  # noqa: E402
from regard.tiling import use_tile_sizes  # noqa: E402

ROOT = Path(__file__).parents[3]


def gpt2(layers=2):
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=50, n_positions=64, n_embd=16, n_layer=layers, n_head=2)
    return transformers.GPT2Model(config).eval()


def bert():
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16
    )
    return transformers.BertModel(config).eval()


def llama():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.4,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def watched(model, *args, **kwargs):
    with torch.no_grad(), regard.watch(model) as recording:
        model(*args, **kwargs)
    return recording


def measure_by_definition(A, real, tokens, windows):
    """Compute every measure of one head from dense weights (batch, n, n); `real` is False for padding."""
    sums = {name: [] for name in ("entropy", "first", "previous", "distance", "duplicate", "induction")}
    sums |= {f"within_{w}": [] for w in windows}
    heavy = [0.0, 0.0]
    for W, live, ids in zip(A, real, tokens, strict=True):
        where = np.flatnonzero(live)
        for i in where:
            w = W[i]
            sums["entropy"].append(-sum(x * np.log(x) for x in w if x > 0))
            sums["first"].append(w[where[0]])
            if i > where[0]:
                sums["previous"].append(w[i - 1])
            sums["distance"].append(sum(w[j] * abs(i - j) for j in range(len(w))))
            for size in windows:
                sums[f"within_{size}"].append(sum(w[j] for j in range(len(w)) if abs(i - j) < size))
            copies = [j for j in where if j < i and ids[j] == ids[i]]
            if copies:
                sums["duplicate"].append(sum(w[j] for j in copies))
                sums["induction"].append(sum(w[j + 1] for j in copies))
        received = np.sort(W[where].sum(0))[::-1]
        heavy[0] += received[: int(np.ceil(len(where) / 10))].sum()
        heavy[1] += received.sum()
    return {name: np.mean(values) for name, values in sums.items()} | {"heavy": heavy[0] / heavy[1]}


@pytest.mark.parametrize("make", [gpt2, bert, llama])
@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_every_measure_equals_its_definition(make, side, small_tiles):
    torch.manual_seed(1)
    ids = torch.randint(1, 9, (2, 21))
    ids[1, :11] = ids[0, :11]  # a common prefix, then different copies
    real = torch.ones(2, 21, dtype=torch.long)
    if side != "none":
        real[1, slice(0, 5) if side == "left" else slice(16, 21)] = 0
        ids[real == 0] = 0
    recording = watched(make(), ids, attention_mask=real)
    table = recording.heads(ids, windows=[3, 7])
    assert table.column("layer") == sorted(table.column("layer"))
    assert len(table) == sum(A.shape[1] for A in recording.values())
    for row in table:
        A = recording[row["module"]].to_dense()[:, row["head"]].double().numpy()
        expected = measure_by_definition(A, real.bool().numpy(), ids.tolist(), [3, 7])
        for name, value in expected.items():
            assert row[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


@pytest.fixture
def small_tiles():
    """Tiles that split these short sequences several times."""
    with use_tile_sizes(rows=8, columns=8):
        yield


class OneHead(torch.nn.Module):
    """One head that is passed its queries and keys."""

    def forward(self, query, key, is_causal=True):
        return torch.nn.functional.scaled_dot_product_attention(query, key, key, is_causal=is_causal)


def record_head(query, key, **options):
    model = OneHead()
    with regard.watch(model) as recording:
        model(query[None, None], key[None, None], **options)
    return recording


def test_heads_of_known_kinds():
    """A head that attends to the previous token scores 1 as `previous`, one that attends to copies as `duplicate`."""
    s = 12
    ids = torch.randperm(20, generator=torch.Generator().manual_seed(0))[:s].repeat(2)
    at, n = torch.eye(2 * s), 2 * s
    tokens = torch.nn.functional.one_hot(ids, 20).float()
    sharp = 1e3
    back = record_head(sharp * at.roll(1, 0), at).heads(ids)
    assert back[0]["previous"] == pytest.approx(1, abs=1e-6)
    # On repeated random tokens: offset s, and offset s − 1. The duplicate head masks the token itself.
    later = torch.arange(n) >= s
    copy = torch.where(later[:, None], at.roll(s, 0), at)
    assert record_head(sharp * copy, at).heads(ids)[0]["duplicate"] == pytest.approx(1, abs=1e-6)
    after = torch.cat([torch.zeros(1, 20), tokens[:-1]])  # each key holds the token before it
    found = record_head(sharp * tokens, after).heads(ids)[0]
    assert found["induction"] == pytest.approx(1, abs=1e-6)
    assert found["duplicate"] < 1e-6 and found["previous"] < 0.1
    sink = record_head(torch.zeros(n, 4), torch.zeros(n, 4))
    assert sink.heads()[0]["first"] == pytest.approx(np.mean(1 / np.arange(1, n + 1)))


def test_cross_attention_has_no_positions_and_tokens_may_fit_some_layers():
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    recording = watched(
        transformers.T5Model(config).eval(),
        input_ids=torch.randint(1, 9, (1, 7)),
        decoder_input_ids=torch.randint(1, 9, (1, 7)),
    )
    table = recording.heads(list("abcabca"))
    across = [row for row in table if "EncDec" in row["module"]]
    assert len(across) == 2 and len(table) == 6
    for row in across:
        assert np.isnan([row["previous"], row["distance"], row["within_16"], row["induction"]]).all()
        assert 0 < row["entropy"] <= np.log(7) and 0 < row["first"] < 1
    assert not any(np.isnan(row["induction"]) for row in table if row not in across)


def test_keys_of_another_length_that_the_first_row_attends_to_are_another_sequence():
    row = record_head(torch.randn(3, 4), torch.randn(9, 4), is_causal=False).heads()[0]
    assert np.isnan([row["previous"], row["distance"]]).all() and not np.isnan(row["first"])


def test_generated_tokens_are_rows_except_the_last():
    model = llama()
    prompt = torch.randint(1, 50, (1, 6), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), regard.watch(model) as steps:
        text = model.generate(prompt, max_new_tokens=5, do_sample=False, pad_token_id=0)
    once = watched(model, text[:, :-1])
    for step, row in zip(steps.heads(text), once.heads(text[:, :-1]), strict=True):
        for name, value in row.items():
            assert step[name] == (pytest.approx(value, rel=1e-4) if isinstance(value, float) else value)


def test_tokens_that_fit_no_layer_are_rejected():
    recording = watched(gpt2(), torch.ones(1, 6, dtype=torch.long))
    with pytest.raises(
        ArgumentError, match=r"recording\.heads: received 3 tokens .* one token for each key of a layer: 6"
    ):
        recording.heads([1, 2, 3])
    with pytest.raises(ArgumentTypeError, match="convert_ids_to_tokens"):
        recording.heads("a text")
    with (
        pytest.warns(regard.lens.EmptyRecordingWarning),
        regard.watch(gpt2(), measures="default") as measured,
    ):
        pass
    assert measured.heads() == []


def test_a_recording_of_measures_raises_with_a_hint():
    model = gpt2()
    with torch.no_grad(), regard.watch(model, measures="default") as recording:
        model(torch.ones(1, 6, dtype=torch.long))
    with pytest.raises(ArgumentError, match=r"\[0\]\.measures\. Or call regard\.watch without measures"):
        recording.heads()


def test_the_table_holds_plain_values():
    table = watched(gpt2(1), torch.ones(1, 6, dtype=torch.long)).heads()
    assert isinstance(table, list) and all(type(row) is dict for row in table)
    assert {type(value) for row in table for value in row.values()} == {str, int, float}
    assert table.sort("entropy").column("entropy") == sorted(table.column("entropy"), reverse=True)
    assert len(table.filter(lambda row: row["head"] == 1)) == 1
    lines = str(table).splitlines()
    assert lines[0].split() == table.columns and len(lines) == 3
    assert type(table[:1]) is type(table[::-1]) is type(table) and str(table[:1]) == "\n".join(lines[:2])


def test_sorting_and_filtering_leave_the_table_as_it_was():
    nan = float("nan")
    table = Table({"layer": i // 2, "weight": w} for i, w in enumerate((0.5, nan, 0.25, 0.5)))
    assert str(table.sort("weight").column("weight")) == "[0.5, 0.5, 0.25, nan]"
    assert table.sort("weight").column("layer") == [0, 1, 1, 0]  # stable
    assert str(table.sort("weight", largest_first=False).column("weight")) == "[0.25, 0.5, 0.5, nan]"
    assert Table([{"name": "b"}, {"name": "a"}]).sort("name", largest_first=False).column("name") == [
        "a",
        "b",
    ]
    for call in (table.sort, table.column, lambda name: table.filter(**{name: 1})):
        with pytest.raises(
            ArgumentError, match=r"received the column 'wieght'; expected one of layer, weight\."
        ):
            call("wieght")
    assert Table([]).sort("weight") == Table([]).column("weight") == []
    assert table.filter(layer=1, weight=0.5) == table[3:] == table.filter(lambda row: row is table[3])
    assert table.filter(lambda row: row["weight"] > 0.3, layer=0) == table[:1]
    assert table.column("layer") == [0, 0, 1, 1]


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_data_frames_accept_the_table(library):
    frames = pytest.importorskip(library)
    table = watched(gpt2(), torch.ones(1, 6, dtype=torch.long)).heads()
    frame = frames.DataFrame(table)
    assert list(frame.columns) == table.columns and frame.shape == (4, len(table.columns))
    assert list(frame["entropy"]) == table.column("entropy")
    own = getattr(table, f"to_{library}")()
    assert own.equals(frame) and list(own.dtypes) == list(frame.dtypes)


def test_the_induction_head_of_the_trained_model_is_found():
    """The repository's own model was trained to repeat; `induction` identifies the head that does."""
    from examples.induction.model import load

    tokens = torch.randint(128, (4, 25), generator=torch.Generator().manual_seed(0)).repeat(1, 2)
    table = watched(load(), tokens).heads(tokens).sort("induction")
    assert table[0]["layer"] == 1 and table[0]["induction"] > 0.5
    before = table.filter(layer=0)
    assert before[0]["induction"] < 0.2
    assert before.sort("previous")[0]["previous"] > 0.5  # the induction head reads its output


def test_layers_of_regard_nn_are_captured():
    """Matrix and output equal the layer's own; with a cache, the steps are joined."""
    torch.manual_seed(0)
    layer = regard.nn.MultiheadAttention(16, 4, num_kv_heads=2, rope="half").eval()
    x = torch.randn(2, 9, 16)
    padding = regard.padding([9, 6])
    with torch.no_grad():
        plain, A = layer(x, mask=regard.causal(), padding=padding, need_matrix=True)
        with regard.watch(layer, values=True) as recording:
            assert torch.equal(layer(x, mask=regard.causal(), padding=padding), plain)
        whole = layer(x[:1], mask=regard.causal(), need_matrix=True)[1]
        with regard.watch(layer) as alone:
            layer(x[:1], mask=regard.causal())
        cache = regard.nn.KVCache()
        with regard.watch(layer) as steps:
            for part in x[:1].split([5, 1, 3], 1):
                layer(part, mask=regard.causal(), cache=cache)
    (call,) = recording.calls("")
    torch.testing.assert_close(call.matrix.to_dense(), A.to_dense())
    mixed = (call.matrix @ call.value).transpose(1, 2).flatten(2)
    torch.testing.assert_close(layer.out_proj(mixed), plain)  # the recorded value is the layer's own
    assert call.mask == regard.causal() & padding
    torch.testing.assert_close(steps[""].to_dense(), whole.to_dense())
    torch.testing.assert_close(alone[""].to_dense(), whole.to_dense())


def run_mixed(model, *args, **kwargs):
    """Record a model, and return its recording and the table with each layer measured by itself."""
    recording = watched(model, *args, **kwargs)
    alone = []
    for name in recording:
        one = watched_layer(model, name, *args, **kwargs)
        alone += [row | {"layer": list(recording).index(name)} for row in one.heads()]
    return recording, alone


def watched_layer(model, name, *args, **kwargs):
    with torch.no_grad(), regard.watch(model, layers=name) as recording:
        model(*args, **kwargs)
    return recording


@pytest.mark.parametrize("length", [1, 9, 257, 300])
@pytest.mark.parametrize("build", [gpt2, bert, llama])
def test_layers_that_are_measured_together_equal_each_alone(build, length):
    """Also with padding that differs between texts, grouped heads, and more rows than are measured together."""
    model = build()
    if length > 64 and build is gpt2:
        pytest.skip("it has 64 positions")
    tokens = torch.randint(50, (2, length), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[0, : length // 3] = 0
    recording, alone = run_mixed(model, tokens, attention_mask=mask)
    assert len(recording) == 2
    for ours, theirs in zip(recording.heads(), alone, strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert (
                ours[name] == pytest.approx(theirs[name], rel=8 * torch.finfo(torch.float32).eps, nan_ok=True)
                if isinstance(ours[name], float)
                else ours[name] == theirs[name]
            )


def test_a_layer_with_a_mask_or_a_scale_of_its_own_is_measured_by_itself():
    class Layers(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = torch.nn.ModuleList(Part(i) for i in range(5))

        def forward(self, x):
            for part in self.parts:
                x = x + part(x)
            return x

    class Part(torch.nn.Module):
        def __init__(self, number):
            super().__init__()
            self.number = number

        def forward(self, x):
            x = x[:, None].expand(-1, 2, -1, -1)
            options = [{}, {"is_causal": True}, {"scale": 2.0}, {}, {"attn_mask": torch.eye(6).bool()}][
                self.number
            ]
            return torch.nn.functional.scaled_dot_product_attention(x, x, x, **options).mean(1)

    torch.manual_seed(0)
    model, x = Layers(), torch.randn(1, 6, 8)
    recording, alone = run_mixed(model, x)
    assert [row["module"] for row in recording.heads()] == [row["module"] for row in alone]
    # Weights are rounded to float32, and large scores of one layer let others take the path of large scores.
    for ours, theirs in zip(recording.heads(), alone, strict=True):
        assert [ours[name] for name in ("entropy", "first", "heavy")] == pytest.approx(
            [theirs[name] for name in ("entropy", "first", "heavy")], rel=8 * torch.finfo(torch.float32).eps
        )
        dense = recording[ours["module"]][0, ours["head"]].to_dense().double().numpy()
        assert ours["first"] == pytest.approx(dense[:, 0].mean(), rel=1e-5)
