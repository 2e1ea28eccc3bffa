"""`effects`: the same numbers as one intervention at a time, without running earlier blocks again."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import regard  # noqa: E402
from regard.interventions import (  # noqa: E402
    ablate,
    attribution,
    effects,
    knockout,
    logit_attribution,
    logit_difference,
    patch,
)
from regard.models import LoadedModel  # noqa: E402
from tests.helpers.nightly import keep_in_ci  # noqa: E402
from tests.helpers.tiny_models import TINY  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
METRIC = logit_difference(answer=7, wrong=9)


def measure(model, inputs, metric, *edits):
    options = {"use_cache": False} if "use_cache" in model.forward.__code__.co_varnames else {}
    with torch.no_grad(), regard.intervene(model, edits):
        return float(metric(model(**inputs, **options)).double().mean())


def norm_of_last(output):
    return output[0][:, -1].norm(dim=-1)


@pytest.mark.parametrize(
    "name, metric", [("GPT-2", METRIC), ("Llama", METRIC), ("T5", METRIC), ("BERT", norm_of_last)]
)
def test_effects_equal_one_intervention_at_a_time(name, metric):
    model, inputs = TINY[name].build(), TINY[name].inputs("none")
    clean = measure(model, inputs, metric)
    table = effects(model, inputs, metric, batch_size=3)
    assert {(row["layer"], row["head"]) for row in table} == {
        (layer, head) for layer in range(6 if name == "T5" or name == "BART" else 2) for head in range(4)
    }
    for row in table:
        alone = measure(model, inputs, metric, ablate(row["layer"], heads=row["head"]))
        assert row["metric"] == pytest.approx(alone, abs=1e-4)
        assert row["effect"] == pytest.approx(alone - clean, abs=1e-4)
    assert table.clean == pytest.approx(clean, abs=1e-5)
    assert max(abs(row["effect"]) for row in table) > 1e-3


def test_means_resampling_and_knockouts():
    tiny = TINY["Llama"]
    model, inputs = tiny.build(), tiny.inputs("none")
    others = inputs | {"input_ids": inputs["input_ids"].flip(1)}
    with torch.no_grad(), regard.watch(model, values=True) as source:
        model(**others, use_cache=False)
    for options, build in (
        ({"baseline": "mean"}, lambda row: ablate(row["layer"], heads=row["head"], baseline="mean")),
        (
            {"baseline": source},
            lambda row: patch(row["layer"], heads=row["head"], source=source, what="output"),
        ),
        ({"keys": slice(2, 5)}, lambda row: knockout(row["layer"], heads=row["head"], keys=slice(2, 5))),
        ({"queries": -1}, lambda row: ablate(row["layer"], heads=row["head"], queries=-1)),
    ):
        for row in effects(model, inputs, METRIC, layers=[1], **options):
            assert row["layer"] == 1
            assert row["metric"] == pytest.approx(measure(model, inputs, METRIC, build(row)), abs=1e-4)


def test_edits_lists_of_edits_and_texts():
    tiny = TINY["GPT-2"]
    model, inputs = tiny.build(), tiny.inputs("none", batch=1)
    tokens = [f"t{i}" for i in range(11)]
    edits = [ablate(1, heads=2), [ablate(0, heads=1), ablate(1, heads=3)], knockout(0, queries=-1, keys="t4")]
    table = effects(model, inputs, METRIC, edits, tokens=tokens)
    for row, entry in zip(table, edits, strict=True):
        listed = entry if isinstance(entry, list) else [entry]
        with torch.no_grad(), regard.intervene(model, listed, tokens=tokens):
            assert row["metric"] == pytest.approx(float(METRIC(model(**inputs)).mean()), abs=1e-4)
    assert table.column("edit")[0] == "ablate(layers=1, heads=2, baseline='zero')"


def test_blocks_before_the_edit_do_not_run_again():
    tiny = TINY["Llama"]
    model, inputs = tiny.build(), tiny.inputs("none")
    counts = {0: 0, 1: 0}
    for i in counts:
        model.model.layers[i].mlp.register_forward_hook(
            lambda module, args, output, i=i: counts.update({i: counts[i] + 1})
        )
    seen = []
    effects(model, inputs, METRIC, layers=1, progress=lambda: seen.append(dict(counts)))
    assert len(seen) == 4 and seen[-1][0] == seen[0][0]  # layer 0 ran in the unchanged passes only
    before = dict(counts)
    effects(model, inputs, METRIC, [ablate(0, heads=i) for i in range(4)])
    assert counts[0] - before[0] == 2 + 1 + 1  # twice unchanged, once with a copy ablated, once for all edits


def test_a_single_number_runs_the_edits_one_by_one():
    tiny = TINY["Llama"]
    model, inputs = tiny.build(), tiny.inputs("none")
    single = effects(model, inputs, lambda output: METRIC(output).mean())
    assert single.column("effect") == pytest.approx(effects(model, inputs, METRIC).column("effect"), abs=1e-4)


def test_nothing_stays_changed_after_an_error():
    tiny = TINY["Llama"]
    model, inputs = tiny.build(), tiny.inputs("none")
    calls = []

    def fail_later(output):
        calls.append(1)
        if len(calls) > 3:
            raise ZeroDivisionError
        return METRIC(output)

    with pytest.raises(ZeroDivisionError):
        effects(model, inputs, fail_later)
    assert not any("forward" in vars(module) for module in model.modules())
    with pytest.raises(regard.ArgumentError, match="one number for each batch entry"):
        effects(model, inputs, lambda output: output.logits)
    with pytest.raises(regard.ArgumentError, match='"heads", or a list of edits'):
        effects(model, inputs, METRIC, "layers")
    with pytest.raises(regard.ArgumentError, match="matches none of 2 attention layers"):
        effects(model, inputs, METRIC, layers=5)
    with pytest.raises(regard.ArgumentTypeError, match="a tensor"):
        effects(model, {"input_ids": 3}, METRIC)


def test_metrics():
    logits = torch.randn(2, 3, 5)
    torch.testing.assert_close(logit_difference(1)(logits), logits[:, -1].log_softmax(-1)[:, 1])
    torch.testing.assert_close(
        logit_difference([1, 2], [3, 4], position=0)(logits.repeat(2, 1, 1)),
        (logits[[0, 1], 0, [1, 2]] - logits[[0, 1], 0, [3, 4]]).repeat(2),
    )
    with pytest.raises(regard.ArgumentError, match="a token id"):
        logit_difference(0.5)
    with pytest.raises(regard.ArgumentTypeError, match="logits"):
        logit_difference(1)(torch.ones(2, 3))


def test_picture_and_page():
    pytest.importorskip("matplotlib")
    tiny = TINY["Llama"]
    table = effects(tiny.build(), tiny.inputs("none"), METRIC)
    drawn = regard.plot.effects(table).images[0]
    largest = max(abs(value) for value in table.column("effect"))
    assert drawn.get_array().shape == (2, 4) and drawn.get_clim() == (-largest, largest)
    page = table.page("Heads & <worth>")
    assert page.title == "Heads & <worth>" and "its output was set to 0" in page.html
    with pytest.raises(regard.ArgumentError, match="a table without heads"):
        effects(tiny.build(), tiny.inputs("none"), METRIC, [ablate()]).page()


def check_one_by_one(model, inputs, metric, **options):
    """Compare effects with one intervention at a time."""
    table = effects(model, inputs, metric, **options)
    clean = measure(model, inputs, metric)
    assert table.clean == pytest.approx(clean, abs=1e-5)
    for row in table:
        expected = measure(model, inputs, metric, ablate(row["module"], heads=row["head"])) - clean
        assert row["effect"] == pytest.approx(expected, abs=1e-4)
    assert max(map(abs, table.column("effect"))) > 1e-2


def test_a_metric_that_forgets_the_batch_runs_the_edits_one_by_one():
    model, inputs = TINY["GPT-2"].build(), TINY["GPT-2"].inputs("none")
    one = {name: value[:1] for name, value in inputs.items()}
    index = one["input_ids"][:, -1:, None]
    check_one_by_one(model, one, lambda output: output.logits[:, -1:].gather(-1, index)[:, 0, 0])


def add_noise(model):
    noise = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=noise), alpha=0.2)
    return model.eval()


@pytest.mark.parametrize("batch", [1, 2])
def test_layers_that_attend_over_windows_of_an_image(batch):
    """The first axis of their calls has more entries than the batch."""
    config = transformers.SwinConfig(
        image_size=16, patch_size=2, embed_dim=16, depths=[2, 1], num_heads=[2, 4], window_size=4
    )
    pixels = torch.randn(batch, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    check_one_by_one(
        add_noise(transformers.SwinModel(config)),
        {"pixel_values": pixels},
        lambda out: out.pooler_output[:, 0],
    )


class SequenceFirst(torch.nn.Module):
    """An encoder whose input is (n, batch, width)."""

    def __init__(self):
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(8, 2, 16)
        self.encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x):
        return self.encoder(x)


@pytest.mark.parametrize("shape", [(2, 4, 8), (4, 4, 8)])
def test_inputs_whose_first_axis_is_not_the_batch(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    check_one_by_one(add_noise(SequenceFirst()), {"x": x}, lambda output: output[-1, :, 0], batch_size=2)


@pytest.mark.parametrize(
    "metric",
    [
        lambda output: output.logits[:, -1].log_softmax(0)[:, 7],
        lambda output: output.logits[:, -1, 7] - output.logits[:, -1, 7].mean(),
        lambda output: output.logits[:, -1, 7] * output.logits[:, -1, 9].mean(),
    ],
    ids=["softmax over the batch", "centred", "mean of the batch"],
)
def test_metrics_that_compare_batch_entries(metric):
    """Copies of the batch that other edits change are not part of it."""
    model, inputs = TINY["Llama"].build(), TINY["Llama"].inputs("none")
    listed = [ablate(1, heads=head, batch=0) for head in range(4)]
    for row, edit in zip(effects(model, inputs, metric, listed), listed, strict=True):
        assert row["metric"] == pytest.approx(measure(model, inputs, metric, edit), abs=1e-5)


@pytest.mark.parametrize("texts", [False, True])
def test_effects_of_a_model_that_is_edited_in_one_batch_entry(texts):
    model, inputs = TINY["Llama"].build(), TINY["Llama"].inputs("none")
    tokens = [list("abcdefghijk"), list("kjihgfedcba")]
    outer = knockout(0, queries=[-1], keys="b") if texts else ablate(0, heads=[1, 2], batch=0)
    with regard.intervene(model, outer, tokens=tokens if texts else None):
        check_one_by_one(model, inputs, METRIC)


@pytest.mark.parametrize("metric", [METRIC, lambda output: output.logits[:, -1, 7].mean()])
def test_a_cache_in_the_inputs_stays_as_it_was(metric):
    model, inputs = TINY["Llama"].build(), TINY["Llama"].inputs("none")

    def fill():
        with torch.no_grad():
            return model(inputs["input_ids"][:, :7], use_cache=True).past_key_values

    rest, cache = inputs["input_ids"][:, 7:], fill()
    table = effects(model, {"input_ids": rest, "past_key_values": cache}, metric, layers=1)
    assert cache.get_seq_length() == 7
    for row in table:
        given = {"input_ids": rest, "past_key_values": fill()}
        assert row["metric"] == pytest.approx(
            measure(model, given, metric, ablate(1, heads=row["head"])), abs=1e-5
        )
    with_graph = model(inputs["input_ids"], use_cache=True).past_key_values
    with pytest.raises(regard.ArgumentError, match=r"computed with gradients.*no_grad"):
        effects(model, {"input_ids": rest, "past_key_values": with_graph}, metric)


class SharedState(torch.nn.Module):
    """Blocks of which each later one reads what the first one has kept."""

    class Block(torch.nn.TransformerEncoderLayer):
        def forward(self, x, kept):
            kept.setdefault("first", x) if self.is_first else None
            return super().forward(x) + kept["first"]

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(self.Block(8, 2, 16, batch_first=True) for _ in range(3))
        for i, layer in enumerate(self.layers):
            layer.is_first = i == 0

    def forward(self, x):
        kept = {}
        for layer in self.layers:
            x = layer(x, kept)
        return x


def test_blocks_that_need_what_an_earlier_one_keeps_run_again():
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))
    check_one_by_one(add_noise(SharedState()), {"x": x}, lambda output: output[:, -1, 0])


@pytest.mark.parametrize("batch_size", [0, -1, 2.5, True])
def test_batch_sizes_that_are_no_counts_are_refused(batch_size):
    with pytest.raises(regard.ArgumentError, match="batch_size"):
        effects(TINY["Llama"].build(), TINY["Llama"].inputs("none"), METRIC, batch_size=batch_size)


@pytest.mark.parametrize("measure", [effects, attribution, logit_attribution])
def test_a_model_or_inputs_of_another_kind_are_refused_by_the_function_itself(measure):
    metric = 7 if measure is logit_attribution else METRIC
    model, inputs = TINY["Llama"].build(), TINY["Llama"].inputs("none")
    loaded = LoadedModel("Llama", model)
    layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    for subject, given, word in (
        (loaded, inputs, "a LoadedModel"),
        (layer, {"x": torch.ones(1, 3, 8)}, "TransformerEncoderLayer.forward does not accept"),
    ):
        with pytest.raises(regard.ArgumentTypeError) as refusal:
            measure(subject, given, metric)
        assert refusal.value.operation == measure.__name__ and word in refusal.value.received


@pytest.mark.parametrize("measure", [effects, attribution])
@pytest.mark.parametrize("metric", ["x", 3, None])
def test_a_metric_that_is_not_a_function_is_refused(measure, metric):
    with pytest.raises(regard.ArgumentTypeError) as refusal:
        measure(TINY["Llama"].build(), TINY["Llama"].inputs("none"), metric)
    assert refusal.value.operation == measure.__name__ and "metric as" in refusal.value.received


def test_answers_that_do_not_fit_the_batch_are_refused():
    for answers in ([3, 5, 7], []):
        with pytest.raises(regard.ArgumentError, match=f"{len(answers)} token ids for 2 batch entries"):
            logit_difference(torch.tensor(answers, dtype=torch.long))(torch.zeros(2, 4, 9))


def test_sorted_filtered_and_sliced_tables_keep_class_and_metric():
    model, inputs = TINY["Llama"].build(), TINY["Llama"].inputs("none")
    table = effects(model, inputs, METRIC)
    for part in (table.sort("effect"), table.filter(layer=1), table[:3]):
        assert type(part) is type(table) and len(part) in (3, 4, 8)
        assert (part.clean, part.metric, part.edit) == (table.clean, table.metric, table.edit)
        assert "effectsPage" in part.page().html


@pytest.mark.parametrize("name", keep_in_ci(["Llama", "T5", "BART"], "Llama"))
def test_means_are_those_of_the_unedited_run_whatever_the_batch_size(name):
    """Several edits run as copies of one batch, and a mean over all copies would include what the others changed."""
    model, inputs = TINY[name].build(), TINY[name].inputs("left")
    with torch.no_grad(), regard.watch(model, values=True) as clean:
        model(**inputs, use_cache=False)
    listed = [
        [ablate(1, heads=0)],
        [ablate(1, heads=0, baseline="mean")],
        [
            ablate(0, heads=1),
            ablate(1, heads=2, baseline="mean"),
            ablate(5 if name != "Llama" else 1, heads=3),
        ],
        [ablate(0, baseline="mean"), ablate(1, baseline="mean", queries=[2, -1], batch=1)],
    ]
    fixed = (
        [replace(edit, baseline=clean) if edit.baseline == "mean" else edit for edit in edits]
        for edits in listed
    )
    expected = [measure(model, inputs, METRIC, *edits) for edits in fixed]
    by_head = {
        (row["layer"], row["head"]): measure(
            model, inputs, METRIC, ablate(row["layer"], heads=row["head"], baseline=clean)
        )
        for row in effects(model, inputs, METRIC, baseline="mean")
    }
    for batch_size in (1, 3, 16):
        rows = effects(model, inputs, METRIC, listed, batch_size=batch_size)
        assert [row["metric"] for row in rows] == pytest.approx(expected, abs=1e-4)
        rows = effects(model, inputs, METRIC, baseline="mean", batch_size=batch_size)
        found = {(row["layer"], row["head"]): row["metric"] for row in rows}
        assert found == pytest.approx(by_head, abs=1e-4)


def test_means_of_a_layer_that_runs_several_times():
    config = transformers.AlbertConfig(
        vocab_size=61, embedding_size=16, hidden_size=32, num_hidden_layers=3, num_attention_heads=4,
        intermediate_size=48, max_position_embeddings=32,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AlbertForMaskedLM(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape), alpha=0.2)
    inputs = {"input_ids": torch.arange(24).reshape(2, 12)}
    projection = model.albert.encoder.albert_layer_groups[0].albert_layers[0].attention.dense
    seen: list = []
    handle = projection.register_forward_pre_hook(lambda _, args: seen.append(args[0].unflatten(-1, (4, 8))))
    with torch.no_grad():
        model(**inputs)
    handle.remove()
    for batch_size in (1, 16):
        for row in effects(model, inputs, METRIC, baseline="mean", batch_size=batch_size):
            means = iter([outputs[..., row["head"], :].mean((0, 1)) for outputs in seen])

            def replace_head(_, args, head=row["head"], means=means):
                outputs = args[0].unflatten(-1, (4, 8)).clone()
                outputs[..., head, :] = next(means)
                return (outputs.flatten(-2),)

            handle = projection.register_forward_pre_hook(replace_head)
            with torch.no_grad():
                expected = float(METRIC(model(**inputs)).mean())
            handle.remove()
            assert row["metric"] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("batch_size", [1, 16])
def test_layers_and_positions_that_do_not_exist_are_refused(batch_size):
    model, inputs = TINY["Llama"].build(), TINY["Llama"].inputs("none")
    for options, message in (
        ({"layers": [0, 2]}, r"layers with 2, .*2 attention layers; expected numbers from 0 to 1"),
        ({"layers": "model.layers.1.mlp"}, r"layers with 'model.layers.1.mlp'"),
        ({"edits": [ablate(0), ablate(7)]}, r"layers with 7"),
        ({"queries": 11}, r"queries 11 are outside the sequence of 11 tokens"),
        ({"edits": [knockout(0, keys=[1, 40]), ablate(1)]}, r"keys 40 are outside the sequence of 11 tokens"),
    ):
        with pytest.raises(regard.ArgumentError, match=message):
            effects(model, inputs, METRIC, batch_size=batch_size, **options)


def test_sweeps_of_several_threads_do_not_mix():
    model, inputs = TINY["Llama"].build(), TINY["Llama"].inputs("none")
    wanted = {baseline: effects(model, inputs, METRIC, baseline=baseline) for baseline in ("zero", "mean")}
    with torch.no_grad():
        plain = model(**inputs).logits
    faults = []

    def work(to):
        try:
            for _ in range(3):
                if to is None:
                    with torch.no_grad():
                        faults.extend([to] * (not torch.equal(model(**inputs).logits, plain)))
                else:
                    found = effects(model, inputs, METRIC, baseline=to)
                    faults.extend(
                        [to]
                        * (found.column("metric") != pytest.approx(wanted[to].column("metric"), abs=1e-5))
                    )
        except BaseException as error:
            faults.append(error)
            raise

    threads = [threading.Thread(target=work, args=(to,)) for to in ("zero", "mean", None, None)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    assert all("forward" not in vars(module) for module in model.modules())
