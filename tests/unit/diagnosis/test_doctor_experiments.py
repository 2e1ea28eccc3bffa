"""The experiments of `regard.doctor` one by one: what they find, and what they need of the model."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from regard import ArgumentTypeError, doctor  # noqa: E402
from regard.diagnosis.rotary import measure_turn  # noqa: E402
from tests.helpers.planted_bugs import make_inputs  # noqa: E402
from tests.helpers.planted_models import PlantedGPT, SequenceFirstEncoder, rotate  # noqa: E402


def kinds(findings):
    return {finding.kind for finding in findings}


class Mixer(nn.Module):
    """One causal layer, and something that goes wrong outside its attention."""

    def __init__(self, mix=None, positions=True, causal=True):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.wpe, self.qkv = nn.Embedding(61, 16), nn.Embedding(64, 16), nn.Linear(16, 48)
        self.mix, self.positions, self.causal = mix, positions, causal

    def forward(self, input_ids):
        x = self.embed(input_ids)
        if self.positions:
            x = x + self.wpe(torch.arange(input_ids.shape[1]))
        query, key, value = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        y = x + y.transpose(1, 2).flatten(2)
        return y if self.mix is None else self.mix(y)


# -- Outputs ----------------------------------------------------------------------------------------------


def test_a_leak_outside_the_attention_is_found():
    assert not doctor(Mixer(), make_inputs()).by_severity("error")
    findings = doctor(Mixer(lambda y: y - y.mean(1, keepdim=True)), make_inputs())
    (finding,) = findings.by_severity("error")
    assert (finding.kind, finding.layer, finding.where.split(",")[0]) == (
        "future leaks",
        -1,
        "the whole model",
    )
    assert finding.rows == tuple(range(11)) and finding.evidence["tokens"] == 12
    assert "causal=False" in finding.message  # it was inferred
    assert not doctor(Mixer(lambda y: y - y.mean(1, keepdim=True)), make_inputs(), causal=False).by_severity(
        "error"
    )


class Convolution(Mixer):
    """No attention: each token is a sum of earlier tokens, or of later ones."""

    def forward(self, input_ids):
        y = self.embed(input_ids) + self.wpe(torch.arange(input_ids.shape[1]))
        return y.cumsum(1) if self.causal else y.flip(1).cumsum(1).flip(1)


@pytest.mark.parametrize("causal", [True, False])
def test_a_model_without_captured_attention_is_not_healthy_and_its_outputs_are_compared(causal):
    findings = doctor(Convolution(causal=causal), make_inputs(), causal=True)
    errors = {finding.kind for finding in findings.by_severity("error")}
    assert "nothing recorded" in errors and ("future leaks" in errors) == (not causal)
    assert "future token" in {check.name for check in findings.checks if not check.reason}


def test_batch_entries_that_are_mixed_outside_the_attention_are_found():
    findings = doctor(Mixer(lambda y: y - y.mean(0, keepdim=True)), make_inputs())
    assert [finding.kind for finding in findings.by_severity("error")] == ["batch entries mixed"]


def test_an_encoder_without_positions_is_a_warning():
    findings = doctor(Mixer(positions=False, causal=False), make_inputs())
    assert kinds(findings) == {"positions have no effect"} and not findings.by_severity("error")
    assert doctor(Mixer(causal=False), make_inputs()) == []


def test_random_outputs_are_found():
    findings = doctor(Mixer(lambda y: y + torch.randn_like(y)), make_inputs())
    assert [finding.kind for finding in findings] == ["not deterministic"]


def test_tokens_that_do_not_attend_to_each_other_are_found():
    model = PlantedGPT(window=1).eval()
    assert "tokens do not reach each other" in kinds(doctor(model, make_inputs(), cached=model.decode))


def test_position_ids_that_are_ignored_are_a_warning():
    model = PlantedGPT(positions="alibi").eval()
    assert "position ids ignored" in kinds(doctor(model, make_inputs(), cached=model.decode))
    model = PlantedGPT(positions="learned").eval()
    assert doctor(model, make_inputs(), cached=model.decode) == []


def test_padding_is_found_although_the_inputs_have_none():
    model = PlantedGPT("padding mask inverted", causal=False).eval()
    findings = doctor(model, make_inputs())
    assert kinds(findings.by_severity("error")) == {"inverted mask"}


# -- Caches -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault", ["positions restart in every chunk", "position one too low in cached steps"]
)
def test_looked_up_positions_of_cached_steps_are_compared(fault):
    model = PlantedGPT(fault, positions="learned").eval()
    findings = doctor(model, make_inputs(), cached=model.decode)
    assert {(finding.kind, finding.layer) for finding in findings.by_severity("error")} == {("positions", 0)}


def test_a_cached_run_that_raises_is_skipped_with_the_reason():
    def fail(input_ids, sizes):
        raise ValueError("no such cache")

    findings = doctor(PlantedGPT().eval(), make_inputs(), cached=fail)
    assert findings == []
    reasons = {check.name: check.reason for check in findings.checks if "raised" in check.reason}
    assert set(reasons) == {"cache, single steps", "cache, chunks of three"}
    assert set(reasons.values()) == {"the model raised ValueError: no such cache"}
    assert "not run  cache, single steps: the model raised ValueError: no such cache" in repr(findings)


def test_a_cache_makes_a_model_causal():
    model = PlantedGPT("causal mask missing").eval()
    findings = doctor(model, make_inputs(), cached=model.decode)
    assert "causal (inferred from the cache)" in findings.scope
    # Without any mask, tokens attend to padding too.
    assert kinds(findings.by_severity("error")) == {"weight on the future", "weight on padding"}
    assert "weight on the future" not in kinds(doctor(model, make_inputs(), causal=False))


# -- Rotary positions -------------------------------------------------------------------------------------


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("start", [0, 4])
def test_the_turn_of_rotated_vectors_is_measured(half, start):
    """Also if only a part of each head turns, as in GPT-NeoX and DeepSeek."""
    vector = torch.randn(1, 2, 1, 16, generator=torch.Generator().manual_seed(0)).expand(1, 2, 40, 16)
    turned = vector.clone()
    part = slice(start, 16 if start == 0 else start + 12)
    turned[..., part] = rotate(vector[..., part], torch.arange(40)[None], half=half)
    turn = measure_turn(turned[0])
    assert (turn.kind, turn.start, turn.layout) == ("even", start, "half" if half else "interleaved")
    size = part.stop - part.start
    expected = 10_000.0 ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    assert torch.allclose(turn.angles, expected, atol=1e-4)


def test_vectors_that_do_more_than_turn_are_unknown():
    vectors = torch.randn(2, 40, 16, generator=torch.Generator().manual_seed(0))
    assert measure_turn(vectors).kind == "unknown"
    assert measure_turn(vectors[:, :1].expand(2, 40, 16)).kind == "none"


# -- Calling models ---------------------------------------------------------------------------------------


def test_a_function_says_how_to_call_the_model():
    model = SequenceFirstEncoder().eval()
    masks = []

    def forward(input_ids, attention_mask):
        masks.append(attention_mask)
        return model(input_ids, attention_mask)

    findings = doctor(model, make_inputs()["input_ids"], forward=forward)
    assert not findings.by_severity("error")
    assert any(not mask.all() for mask in masks)  # padded
    wrong = doctor(model, make_inputs()["input_ids"], forward=lambda ids, mask: model(ids, mask * 0 + 1))
    assert kinds(wrong.by_severity("error")) == {"weight on padding"}


def test_the_model_is_left_as_it_was():
    model = PlantedGPT().train()
    model.blocks[1].eval()
    modes = [module.training for module in model.modules()]
    doctor(model, make_inputs(), cached=model.decode)
    assert [module.training for module in model.modules()] == modes
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(weight.grad is None for weight in model.parameters())


def test_wrong_arguments_are_refused():
    with pytest.raises(ArgumentTypeError, match=r"doctor: .*expected a torch\.nn\.Module"):
        doctor(lambda ids: ids, make_inputs())
    with pytest.raises(ArgumentTypeError, match=r"doctor: .*expected token ids"):
        doctor(PlantedGPT(), [[1, 2, 3]])


def test_padding_that_is_mixed_outside_the_attention_is_a_warning_with_its_module():
    model = Padded()
    findings = doctor(model, make_inputs("right"))
    (finding,) = [found for found in findings if found.kind == "padding changes the output"]
    assert (finding.severity, finding.module) == ("warning", "mix") and "convolutions" in finding.hint
    assert not findings.by_severity("error")


class Padded(Mixer):
    """An encoder that masks its padding, and then convolves over it."""

    def __init__(self):
        super().__init__(causal=False)
        self.mix = nn.Conv1d(16, 16, 3, padding=1)
        self.eval()

    def forward(self, input_ids, attention_mask=None):
        mask = None if attention_mask is None else attention_mask[:, None, None].bool()
        y = self.embed(input_ids) + self.wpe(torch.arange(input_ids.shape[1]))
        heads = y.unflatten(-1, (4, -1)).transpose(1, 2)
        y = y + F.scaled_dot_product_attention(heads, heads, heads, mask).transpose(1, 2).flatten(2)
        return self.mix(y.mT).mT


# -- Models that are called or that answer in other ways ------------------------------------------------------


class Decoder(nn.Module):
    """A healthy decoder of one layer with learned positions; subclasses say how it is called."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.wpe, self.head = nn.Embedding(61, 16), nn.Embedding(64, 16), nn.Linear(16, 61)
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))

    def decode(self, ids, mask=None, positions=None, past=None):
        """Return logits, (batch, n, 61), and keys and values."""
        start = 0 if past is None else past[0].shape[2]
        positions = torch.arange(start, start + ids.shape[1]) if positions is None else positions
        x = self.embed(ids) + self.wpe(positions)
        query, key, value = (
            layer(x).unflatten(-1, (2, 8)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        if past is not None:
            key, value = (torch.cat(pair, 2) for pair in zip(past, (key, value), strict=True))
        allowed = torch.ones(ids.shape[1], key.shape[2], dtype=torch.bool).tril(start)
        if mask is not None:
            own = torch.eye(ids.shape[1], key.shape[2], dtype=torch.bool).roll(start, 1)
            allowed = (allowed & mask[:, None, None].bool()) | own
        y = F.scaled_dot_product_attention(query, key, value, attn_mask=allowed)
        return self.head(x + y.transpose(1, 2).flatten(2)), (key, value)

    def forward(self, input_ids):
        return self.decode(input_ids)[0]


class WithCache(Decoder):
    answer = tuple

    def forward(
        self, input_ids, attention_mask=None, position_ids=None, past_key_values=None, use_cache=False
    ):
        logits, cache = self.decode(input_ids, attention_mask, position_ids, past_key_values)
        cache = cache if use_cache else None
        if self.answer is tuple:
            return logits, cache
        return self.answer(logits=logits, past_key_values=cache)


class Required(Decoder):
    def forward(self, input_ids, attention_mask, position_ids):
        return self.decode(input_ids, attention_mask, position_ids)[0]


def reasons(findings):
    return {check.name: check.reason for check in findings.checks}


@pytest.mark.parametrize("answer", [tuple, dict, SimpleNamespace])
def test_a_cache_is_found_in_any_kind_of_output(answer):
    model = WithCache()
    model.answer = answer
    findings = doctor(model, make_inputs())
    cached = {name: reason for name, reason in reasons(findings).items() if "cache, " in name}
    assert not findings.by_severity("error") and set(cached.values()) == {""} and len(cached) == 2
    model.decode = lambda ids, mask, positions, past: Decoder.decode(
        model, ids, mask, torch.arange(ids.shape[1]), past
    )
    assert "positions" in kinds(doctor(model, make_inputs()).by_severity("error"))


def test_arguments_that_a_model_requires_are_passed():
    inputs = make_inputs()
    inputs |= {
        "attention_mask": torch.ones_like(inputs["input_ids"]),
        "position_ids": torch.arange(11).expand(2, 11),
    }
    findings = doctor(Required(), inputs)
    assert not findings
    assert {
        reasons(findings)[name] for name in ("future token", "padding on the left", "rotary positions")
    } == {""}


@pytest.mark.parametrize("ids", [torch.full((1, 6), 5), torch.tensor([[7]]), torch.tensor([[3, 9]])])
def test_few_distinct_tokens_are_no_evidence(ids):
    model = Decoder()
    nn.init.zeros_(model.wpe.weight)  # equal tokens have equal states
    assert not doctor(model, ids).by_severity("error")


def test_a_model_that_returns_no_cache_is_not_run_with_one():
    class Forgets(WithCache):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)[:1]

    Forgets.forward.__signature__ = inspect.signature(WithCache.forward)
    findings = doctor(Forgets(), make_inputs())
    assert not findings
    assert reasons(findings)["cache, single steps"] == "the model does not return past_key_values"


def test_a_convolution_that_reads_padding_is_a_warning():
    class Convolves(Decoder):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv1d(61, 61, 3, padding=1)

        def forward(self, input_ids, attention_mask=None, position_ids=None):
            positions = torch.arange(input_ids.shape[1]) if position_ids is None else position_ids
            x = self.embed(input_ids) + self.wpe(positions)
            query, key, value = (
                layer(x).unflatten(-1, (2, 8)).transpose(1, 2) for layer in (self.q, self.k, self.v)
            )
            mask = None if attention_mask is None else attention_mask[:, None, None].bool()
            y = F.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2).flatten(2)
            return self.conv(self.head(x + y).transpose(1, 2)).transpose(1, 2)

    findings = doctor(Convolves(), make_inputs(), causal=False)
    found = {finding.kind: finding for finding in findings}
    assert not findings.by_severity("error")
    assert found["padding changes the output"].severity == "warning"


def test_logits_of_minus_infinity_do_not_differ():
    class Forbids(Decoder):
        def forward(self, input_ids):
            return super().forward(input_ids).index_fill(-1, torch.arange(5), -float("inf"))

    findings = doctor(Forbids(), make_inputs())
    assert not findings and reasons(findings)["future token"] == ""


@pytest.mark.parametrize(
    "change",
    [lambda y: y.transpose(0, 1), lambda y: y.flatten(0, 1), lambda y: y.mean(), lambda y: y[0, 0, 0]],
)
def test_outputs_without_an_axis_of_the_batch_are_not_compared(change):
    class Other(Decoder):
        def forward(self, input_ids):
            return change(super().forward(input_ids))

    findings = doctor(Other(), make_inputs())
    assert not findings and "first axis is not the batch" in reasons(findings)["batch entries"]
    assert reasons(findings)["repeated run"] == "" and "raised" not in str(findings)


def test_a_batch_that_may_be_the_second_axis_is_not_changed():
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0)
    assert layer.self_attn.batch_first is False
    findings = doctor(layer, torch.randn(7, 3, 16))
    assert not findings.by_severity("error") and "batch_first" in reasons(findings)["batch entries"]


@pytest.mark.parametrize("rows", [11, 8])
def test_a_model_of_a_fixed_or_short_length_is_probed_at_that_length(rows):
    class Short(Decoder):
        def __init__(self):
            super().__init__()
            self.wpe = nn.Embedding(rows, 16)

        def forward(self, input_ids):
            if rows == 11 and input_ids.shape[1] != 11:
                raise ValueError("only 11 tokens")
            return super().forward(input_ids)

    findings = doctor(Short(), make_inputs()["input_ids"][:, :rows])
    assert not findings and reasons(findings)["future token"] == ""


def test_arguments_that_a_model_changes_in_place_are_copies():
    class Clamps(WithCache):
        def forward(self, input_ids, attention_mask=None, **options):
            input_ids.clamp_(max=50)
            mask = None if attention_mask is None else attention_mask.clone()
            attention_mask is None or attention_mask.zero_()
            return super().forward(input_ids, mask, **options)

    inputs = make_inputs("left")
    before = {name: value.clone() for name, value in inputs.items()}
    findings = doctor(Clamps(), inputs)
    assert all(torch.equal(inputs[name], value) for name, value in before.items())
    assert kinds(findings.by_severity("error")) == kinds(doctor(WithCache(), inputs).by_severity("error"))


def test_buffers_and_random_numbers_are_left_as_they_were():
    class Counts(Decoder):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))
            self.register_buffer("last", torch.zeros(1), persistent=False)

        def forward(self, input_ids):
            self.calls += torch.rand(()).ceil()
            self.last = input_ids.float()
            return super().forward(input_ids)

    model, state = Counts(), torch.get_rng_state()
    last = model.last
    doctor(model, make_inputs())
    assert float(model.calls) == 0 and model.last is last and torch.equal(torch.get_rng_state(), state)


class Offset(nn.Module):
    """Adds and subtracts 1,000, which leaves nothing of small numbers in bfloat16."""

    def forward(self, y):
        return (y + 1000) - 1000


def test_a_module_that_half_precision_breaks_is_a_warning():
    findings = doctor(Mixer(Offset()).bfloat16(), make_inputs())
    (finding,) = [found for found in findings if found.kind == "dtype"]
    assert (finding.severity, finding.module) == ("warning", "mix")
    assert finding.evidence["input"] < 0.05 < 0.5 < finding.evidence["output"]
    assert "dtype" not in kinds(doctor(Mixer(nn.Identity()).bfloat16(), make_inputs()))
    reasons = {check.name: check.reason for check in doctor(Mixer(Offset()), make_inputs()).checks}
    assert reasons["dtype against float32"] == "the model is in float32 or wider"
