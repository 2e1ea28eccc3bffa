"""`regard.watch` on plain PyTorch: what it records, what it restores, and what it rejects."""

from __future__ import annotations

import copy
import gc
import threading

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.nn.attention.bias import causal_lower_right, causal_upper_left  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention as imported_earlier  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import regard  # noqa: E402
from regard import ArgumentError, ArgumentTypeError, NotCapturedError, causal, padding  # noqa: E402
from regard.capture import patching, watchers  # noqa: E402
from regard.lens import EmptyRecordingWarning  # noqa: E402


class Block(nn.Module):
    """Causal attention over a shared projection; `how` says how the function is looked up."""

    def __init__(self, width: int = 32, heads: int = 4, how: str = "attribute") -> None:
        super().__init__()
        self.qkv, self.out, self.heads, self.how = (
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
            heads,
            how,
        )

    def forward(self, x):
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)
        )
        attend = F.scaled_dot_product_attention if self.how == "attribute" else imported_earlier
        return self.out(attend(query, key, value, is_causal=True).transpose(1, 2).flatten(2))


def stack(**options) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(**options), Block(**options)).eval()


X = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(1))


def list_functions() -> list[object]:
    """List every function that a watch may patch."""
    functions = [
        F.scaled_dot_product_attention,
        F.multi_head_attention_forward,
        torch._native_multi_head_attention,
    ]
    return [*functions, torch._transformer_encoder_layer_fwd, imported_earlier]


@pytest.fixture(autouse=True)
def check_nothing_stays_patched():
    before = list_functions()
    yield
    assert all(a is b for a, b in zip(before, list_functions(), strict=True))
    assert not watchers.watched and not patching.list_patches()


def count_hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


# -- Recorded matrices ------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["attribute", "imported"])
def test_a_hand_written_model(how):
    model = stack(how=how)
    plain = model(X)
    with regard.watch(model) as recording:
        assert torch.equal(model(X), plain)
    assert list(recording) == ["0", "1"] and len(recording) == 2 and "0" in recording and "2" not in recording
    query, key = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in model[0].qkv(X).chunk(3, -1)[:2])
    scores = query @ key.mT / 8**0.5 + torch.full((7, 7), -torch.inf).triu(1)
    torch.testing.assert_close(recording["0"].to_dense(), scores.softmax(-1).detach())
    assert recording["0"].mask == causal()
    call = recording.calls("0")[0]
    assert (call.layer_class, call.kernel, call.is_causal) == ("Block", "torch: flash on CPU", True)
    torch.testing.assert_close(call.lse, scores.logsumexp(-1).detach())
    # References, not copies: the keys are where the projection wrote them.
    assert call.query.untyped_storage().data_ptr() == call.key.untyped_storage().data_ptr()


class Biased(nn.Module):
    """Attention with torch's causal bias, a mask without data that looks up the function by its name."""

    def forward(self, query, key, bias):
        before = F.scaled_dot_product_attention(query, key, key, bias)
        return before + imported_earlier(query, key, key, attn_mask=bias)


@pytest.mark.parametrize("corner", [causal_lower_right, causal_upper_left])
def test_a_causal_bias_of_torch(corner):
    query, key = (torch.randn(1, 2, n, 8, generator=torch.Generator().manual_seed(n)) for n in (3, 8))
    model, bias = Biased(), corner(3, 8)
    expected = model(query, key, bias)
    with pytest.warns(EmptyRecordingWarning), regard.watch(nn.Linear(2, 2)):  # another model
        assert torch.equal(2 * F.scaled_dot_product_attention(query, key, key, bias), expected)
    with regard.watch(model) as recording:
        assert torch.equal(model(query, key, bias), expected)
    align = "lower_right" if corner is causal_lower_right else "upper_left"
    definition = regard.attention(query, key, mask=causal(align=align)).to_dense()
    for call in recording.calls(""):
        assert torch.allclose(call.matrix.to_dense(), definition, atol=1e-6)
    assert len(recording.calls("")) == 2


@pytest.mark.parametrize("corner", [causal_lower_right, causal_upper_left])
def test_a_causal_bias_outside_the_watched_model(corner):
    """Code that holds torch's function, in whichever place, gets the result it gets without a watch."""
    query, key = (torch.randn(1, 2, n, 8, generator=torch.Generator().manual_seed(n)) for n in (3, 8))
    bias, elsewhere = corner(3, 8), {"attend": imported_earlier}
    method = vars(type(bias))["__torch_function__"]
    expected = elsewhere["attend"](query, key, key, bias)
    for args, options in (((bias,), {}), ((), {"attn_mask": bias})):
        with pytest.warns(EmptyRecordingWarning), regard.watch(stack()):
            assert torch.equal(elsewhere["attend"](query, key, key, *args, **options), expected)
    assert vars(type(bias))["__torch_function__"] is method


def test_gradients_do_not_change():
    plain, watched = stack(), stack()
    plain(X).square().sum().backward()
    with regard.watch(watched) as recording:
        watched(X).square().sum().backward()
    for a, b in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    assert not recording.calls("0")[0].query.requires_grad


LATE = torch.arange(7)[None] >= torch.tensor([[7], [5]])


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_averaged_weights_of_as_many_texts_as_heads_are_captured(batch):
    layer = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(batch, 5, 8, generator=torch.Generator().manual_seed(0))
    with regard.watch(layer) as recording:
        _, weights = layer(x, x, x)
    torch.testing.assert_close(recording[""].to_dense().mean(1), weights.detach())


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(
    "masks", [{}, {"key_padding_mask": LATE}, {"attn_mask": torch.ones(7, 7).triu(1).bool()}]
)
def test_multihead_attention_by_every_path(training, need_weights, grad, masks):
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(32, 4, batch_first=True).train(training)
    with torch.set_grad_enabled(grad):
        plain, weights = layer(X, X, X, need_weights=need_weights, average_attn_weights=False, **masks)
        with regard.watch(layer) as recording:
            output, _ = layer(X, X, X, need_weights=need_weights, average_attn_weights=False, **masks)
        assert torch.equal(output, plain)
        weights = weights if need_weights else layer(X, X, X, average_attn_weights=False, **masks)[1]
    torch.testing.assert_close(recording[""].to_dense(), weights.detach())
    expected = {"key_padding_mask": padding([7, 5]), "attn_mask": causal()}
    assert recording[""].mask == (expected[next(iter(masks))] if masks else None)


def test_weights_averaged_over_heads_are_those_of_each_head():
    layer = nn.MultiheadAttention(32, 4, batch_first=True)
    with regard.watch(layer) as recording:
        _, weights = layer(X, X[:, :3], X[:, :3])
    torch.testing.assert_close(recording[""].to_dense().mean(1), weights.detach())


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("options", "mask"),
    [
        ({}, None),
        ({"mask": nn.Transformer.generate_square_subsequent_mask(7), "is_causal": True}, causal()),
        ({"src_key_padding_mask": LATE}, padding([7, 5])),
        ({"mask": torch.ones(7, 7).triu(1).bool(), "src_key_padding_mask": LATE}, causal() & padding([7, 5])),
    ],
)
def test_the_transformer_encoder_and_its_fast_path(norm_first, training, options, mask):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(training)
    with torch.no_grad():
        plain = model(X, **options)
        with regard.watch(model) as recording:
            output = model(X, **options)
    assert torch.equal(output, plain)
    assert list(recording) == ["layers.0.self_attn", "layers.1.self_attn"]
    fast = "torch: fused encoder layer (fast path)"
    kernels = {recording.calls(name)[0].kernel for name in recording}
    assert (kernels == {fast}) is not training
    first = model.layers[0]
    x = first.norm1(X) if norm_first else X
    given = {"attn_mask": options.get("mask"), "key_padding_mask": options.get("src_key_padding_mask")}
    if given["attn_mask"] is not None and given["key_padding_mask"] is not None:
        given["attn_mask"] = given["attn_mask"].bool()
    _, weights = first.self_attn(x, x, x, average_attn_weights=False, **given)
    torch.testing.assert_close(recording["layers.0.self_attn"].to_dense(), weights.detach())
    assert recording["layers.0.self_attn"].mask == mask


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_rejected():
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=True).eval()
    with (
        torch.no_grad(),
        pytest.raises(NotCapturedError, match="nested tensors") as error,
        regard.watch(model),
    ):
        model(X, src_key_padding_mask=LATE)
    assert "enable_nested_tensor=False" in error.value.hint


def test_a_layer_without_weights_is_rejected():
    class SelfAttention(Block):
        def forward(self, x):
            query, key, value = self.qkv(x).chunk(3, -1)
            return query @ (key.mT @ value)

    model = nn.Sequential(SelfAttention(), Block())
    with (
        pytest.raises(
            NotCapturedError,
            match="'0' was not captured: SelfAttention computes its weights without calling a watched function",
        ),
        regard.watch(model),
    ):
        model(X)
    with regard.watch(model, layers="1") as recording:
        model(X)
    assert list(recording) == ["1"]


def test_linear_attention_in_a_processor_has_no_weights_to_record():
    class LinearAttnProcessor:
        def __call__(self, features):
            return features @ (features.mT @ features)

    class Attention(nn.Module):
        """Attention as diffusers builds it: the processor chooses how it is computed."""

        def __init__(self):
            super().__init__()
            self.to_q, self.processor = nn.Linear(32, 32), LinearAttnProcessor()

        def forward(self, x):
            return self.processor(self.to_q(x).relu())

    model = nn.Sequential(Attention(), Block())
    with regard.watch(model) as recording:
        model(torch.randn(1, 5, 32))
    assert list(recording) == ["1"]
    model[0].processor = lambda features: features
    with pytest.raises(NotCapturedError, match="'0' was not captured"), regard.watch(model):
        model(torch.randn(1, 5, 32))


def test_a_model_without_any_captured_attention_is_rejected():
    with (
        pytest.raises(
            NotCapturedError, match="was not captured: Sequential called no watched attention function"
        ),
        regard.watch(model := nn.Sequential(nn.Linear(32, 4))),
    ):
        model(X)


def test_a_block_in_which_nothing_was_captured_warns():
    model = nn.Sequential(*stack(), nn.Linear(32, 32))
    other = copy.deepcopy(model)
    with pytest.warns(EmptyRecordingWarning, match="Sequential did not run inside the block") as caught:  # noqa: SIM117
        with regard.watch(model) as recording:
            other(X)
    assert caught[0].filename == __file__ and len(caught) == 1
    assert not len(recording)
    with (
        pytest.warns(EmptyRecordingWarning, match="no module of the 1 in layers= computed attention"),
        regard.watch(model, layers="2"),
    ):
        model(X)
    with (
        pytest.warns(EmptyRecordingWarning, match="did not run"),
        regard.watch(model, measures="default"),
    ):
        model[2](X)
    watching = regard.watch(model)
    with watching:
        model(X)
    with watching as recording:  # continued, so it is not empty
        pass
    assert len(recording) == 2
    with pytest.raises(ZeroDivisionError), regard.watch(model):
        raise ZeroDivisionError


@pytest.mark.filterwarnings("ignore::regard.lens.EmptyRecordingWarning")
def test_an_empty_recording_is_never_healthy():
    with regard.watch(stack()) as recording:
        pass
    findings = recording.diagnose()
    assert [(finding.kind, finding.severity, finding.layer) for finding in findings] == [
        ("nothing recorded", "error", -1)
    ]
    assert str(findings).startswith("1 error in 0 layers") and "No problems found" not in str(findings)
    assert "regard.watch" in findings[0].as_dict()["hint"]


class Checkpointed(nn.Sequential):
    """Runs each layer again in the backward pass."""

    def __init__(self, use_reentrant, *layers) -> None:
        super().__init__(*layers)
        self.use_reentrant = use_reentrant

    def forward(self, x):
        for layer in self:
            x = checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return x


class OwnSoftmax(Block):
    def forward(self, x):
        query, key, value = self.qkv(x).chunk(3, -1)
        return self.out((query @ key.mT).softmax(-1) @ value)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("layer", [Block, OwnSoftmax, "MultiheadAttention"])
def test_a_layer_that_checkpointing_runs_again_is_recorded_once(use_reentrant, layer):
    torch.manual_seed(0)
    if layer == "MultiheadAttention":
        layers = [nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True) for _ in range(2)]
    else:
        layers = [layer(), layer()]
    model, plain = Checkpointed(use_reentrant, *layers), nn.Sequential(*layers)
    plain(X).sum().backward()
    gradients = [parameter.grad.clone() for parameter in plain.parameters()]
    plain.zero_grad()
    with regard.watch(plain) as expected:
        plain(X)
    x = X.clone().requires_grad_()
    counted = []
    measures = {"entropy": regard.Entropy()}
    with (
        regard.watch(model, values=True) as recording,
        regard.watch(model, measures=measures) as measured,
        regard.watch(model, measures=lambda call: counted.append(call.name) or {}),
    ):
        model(x).sum().backward()
    assert list(recording) == list(measured) == list(expected) == list(dict.fromkeys(counted))
    assert len(counted) == 2
    for name in recording:
        assert torch.equal(recording[name].to_dense(), expected[name].to_dense())  # one call
    assert len(recording.heads()) == len(expected.heads())
    assert recording.diagnose().scope == expected.diagnose().scope
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


class Outer(nn.Module):
    """A layer that is no submodule: a list holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.block = [Block()], Block()

    def attend(self, x):
        return self.hidden[0](x)

    def forward(self, x):
        return self.block(self.attend(x))

    def assist(self, other, x):
        return other(x) + self.block(x)


def test_a_layer_that_is_no_submodule_belongs_to_the_module_that_calls_it():
    model = Outer()
    with regard.watch(model) as recording:
        model(X)
    assert list(recording) == ["", "block"]


def test_another_model_that_runs_in_a_method_of_the_watched_one_is_not_recorded():
    model, wrapped = Outer(), nn.Sequential(Outer())
    with regard.watch(model) as recording:
        model.assist(stack(), X)
    assert list(recording) == ["block"]
    wrapped.forward = lambda x: wrapped[0].assist(stack(), x)
    with regard.watch(wrapped) as recording:
        wrapped(X)
    assert list(recording) == ["0.block"]


# -- Options ----------------------------------------------------------------------------------------------


def test_layers_are_names_or_patterns():
    model = nn.ModuleDict({"a": stack(), "b": stack()})
    for layers, found in {
        "a": ["a.0", "a.1"],
        "*.1": ["a.1", "b.1"],
        ("a.0", "b"): ["a.0", "b.0", "b.1"],
    }.items():
        with regard.watch(model, layers=layers) as recording:
            for part in model.values():
                part(X)
        assert list(recording) == found
    with pytest.raises(ArgumentError, match="layers with 'c'"):
        regard.watch(model, layers=["a", "c"])


def test_device_dtype_copy_and_values():
    model = stack()
    with regard.watch(model, dtype=torch.float16, values=True) as recording:
        model(X)
    call = recording.calls("0")[0]
    assert call.query.dtype == call.key.dtype == call.value.dtype == call.output.dtype == torch.float16
    with regard.watch(model) as exact:
        model(X)
    torch.testing.assert_close(recording["0"].to_dense(), exact["0"].to_dense(), atol=1e-3, rtol=0)
    with regard.watch(model, copy=True, values=True) as recording:
        model(X)
    call = recording.calls("0")[0]
    assert call.key.untyped_storage().nbytes() == call.key.nbytes
    torch.testing.assert_close(call.matrix @ call.value, call.output)


@pytest.mark.parametrize(
    ("options", "held"),
    [
        ({}, "query float32 (2, 4, 7, 8), key float32 (2, 4, 7, 8), lse float32 (2, 4, 7)"),
        ({"dtype": torch.float64}, "query float64 (2, 4, 7, 8), key float64 (2, 4, 7, 8)"),
        ({"measures": {"entropy": regard.Entropy()}}, "entropy float64 (2, 4, 7)"),
    ],
)
def test_the_repr_of_a_call_has_shapes_and_no_numbers(options, held):
    with regard.watch(model := stack(), **options) as recording:
        model(X)
    (call,) = recording.calls("1")
    assert (
        repr(call).split()
        == (
            "Call('1', Block, (batch 2, heads 4, q_len 7, kv_len 7), torch: flash on CPU; " + held + ")"
        ).split()
    )


def test_the_repr_of_a_call_with_its_own_weights_or_a_mask_is_short():
    layer = nn.MultiheadAttention(32, 4, batch_first=True)
    mask = torch.rand(7, 7, generator=torch.Generator().manual_seed(0)) < 0.5
    with regard.watch(nn.Sequential(layer), values=True) as recording:
        layer(X, X, X, attn_mask=mask, need_weights=True)
    (call,) = recording.calls("0")
    assert len(repr(call)) < 400 and "tensor(" not in repr(call) and "array(" not in repr(call)


def test_measures_instead_of_queries_and_keys():
    model = stack()
    with regard.watch(model) as exact:
        model(X)
    with regard.watch(model, measures={"spread": regard.Spread()}) as recording:
        model(X)
    call = recording.calls("0")[0]
    assert call.query is None and call.key is None and call.shape == (2, 4, 7, 7)
    torch.testing.assert_close(call.measures["spread"], exact["0"].measure(spread=regard.Spread()).spread)
    with pytest.raises(ArgumentError, match="a recording with measures only: spread"):
        recording["0"]
    with regard.watch(model, measures="default") as recording:
        model(X)
    assert set(recording.calls("1")[0].measures) == {"entropy", "first", "distance"}


def test_an_overwritten_key_raises():
    class Careless(Block):
        def forward(self, x):
            key = self.qkv(x).unflatten(-1, (3, 4, 8))[:, :, 0].transpose(1, 2).clone()
            output = F.scaled_dot_product_attention(key, key, key)
            key.zero_()
            return output

    model = Careless()
    with torch.no_grad(), regard.watch(model) as recording:
        model(X)
    with pytest.raises(ArgumentError, match="overwrote after the call") as error:
        recording[""]
    assert "copy=True" in error.value.hint
    with torch.no_grad(), regard.watch(model, copy=True) as recording:
        model(X)
    assert recording[""].scores[0, 0, 0].any()


class Attend(nn.Module):
    """Attention as a function of query, key and value."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


MASK = torch.rand(6, 6, generator=torch.Generator().manual_seed(0)) < 0.5


def by_sdpa(query, key, value, array):
    return F.scaled_dot_product_attention(query, key, value, attn_mask=array)


def add_sink(scores, sink):
    return torch.cat([scores, sink[:, None, None].expand(2, 4, 6, 1)], -1)


# What a call is given, how, and how it changes the scores; the last column of the scores may be a sink.
OVERWRITTEN = {
    "booleans": (MASK, by_sdpa, lambda scores, array: scores.masked_fill(~array, -torch.inf)),
    "numbers": (torch.randn(6, 6), by_sdpa, torch.add),
    "expanded": (torch.randn(1, 4, 6, 6).expand(2, 4, 6, 6), by_sdpa, torch.add),
    "mask of regard": (
        MASK,
        lambda q, k, v, array: regard.attention(q, k, mask=causal() & regard.masks.dense(array)) @ v,
        lambda scores, array: scores.masked_fill(~array.tril(), -torch.inf),
    ),
    "sink": (torch.randn(4), lambda q, k, v, array: regard.attention(q, k, sink=array) @ v, add_sink),
}


@pytest.mark.parametrize("name", OVERWRITTEN)
@pytest.mark.parametrize("was_written", [False, True])
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("copied", [False, True])
def test_an_array_that_is_overwritten_later_raises_or_was_copied(name, was_written, inference, copied):
    array, attend, change = OVERWRITTEN[name]
    query, key, value = torch.randn(3, 2, 4, 6, 8).unbind()
    with torch.inference_mode(inference):
        array = array[:1].clone().expand(array.shape) if name == "expanded" else array.clone()
        if was_written:
            array[:1] = array[:1].clone()
        expected = change(query @ key.mT / 8**0.5, array.clone()).softmax(-1).nan_to_num(0.0)[..., :6]
        layers = nn.ModuleList([Attend(attend), Attend(attend)])
        with regard.watch(layers, copy=copied) as recording:
            for layer in layers:
                layer(query, key, value, array)
        array[:1] = 1 if array.dtype == torch.bool else 9.0
    if copied or was_written or inference:
        for layer in "01":
            torch.testing.assert_close(recording[layer].to_dense(), expected)
    else:
        with pytest.raises(ArgumentError, match="overwrote after the call"):
            recording["0"]
    first, second = (recording.calls(layer)[0].compact_mask.stored_arrays for layer in "01")
    storages = {array.untyped_storage().data_ptr(): array.untyped_storage() for array in (*first, *second)}
    assert sum(map(len, storages.values())) <= array.untyped_storage().nbytes()  # one copy for all layers


def test_a_numpy_mask_that_is_overwritten_later():
    array, (query, key, value) = MASK.numpy().copy(), torch.randn(3, 2, 4, 6, 8).unbind()
    expected = (query @ key.mT / 8**0.5).masked_fill(~MASK, -torch.inf).softmax(-1).nan_to_num(0.0)
    layer = Attend(lambda q, k, v: regard.attention(q, k, mask=~~regard.masks.dense(array)) @ v)
    with regard.watch(nn.Sequential(layer)) as recording:
        layer(query, key, value)
    array[:] = True
    torch.testing.assert_close(recording["0"].to_dense(), expected)


def test_wrong_names_raise_with_a_similar_one():
    model = stack()
    with regard.watch(model) as recording:
        with pytest.raises(NotCapturedError, match="an empty recording"):
            recording["0"]
        model(X)
    with pytest.raises(NotCapturedError, match="one of 2, such as '0'"):
        recording["00"]
    with pytest.raises(KeyError):
        recording.calls("x")
    assert recording.get("x") is None
    assert repr(recording).splitlines()[1] == "  0: (batch 2, heads 4, q_len 7, kv_len 7)"


# -- Restored ---------------------------------------------------------------------------------------------


def test_nested_repeated_and_in_any_order():
    model, other = stack(), stack()
    a, b, c = regard.watch(model), regard.watch(model), regard.watch(other)
    recording_a = a.__enter__()
    recording_b = b.__enter__()
    recording_c = c.__enter__()
    model(X)
    a.__exit__(None, None, None)
    model(X)
    other(X)
    c.__exit__(None, None, None)
    b.__exit__(None, None, None)
    assert [len(recording.calls("0")) for recording in (recording_a, recording_b, recording_c)] == [1, 2, 1]
    with regard.watch(model) as again:
        model(X)
    assert len(again.calls("0")) == 1 and count_hooks(model) == count_hooks(other) == 0
    with a, pytest.raises(ArgumentError, match="already been entered"), a:
        pass


def test_an_exception_passes_and_everything_is_restored():
    model = stack()
    with pytest.raises(RuntimeError), regard.watch(model):
        model(X[..., :3])
    assert count_hooks(model) == 0
    model.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), regard.watch(model) as recording:
        model(X)
    assert len(recording) == 2 and count_hooks(model) == 1


def test_a_function_that_the_user_patched_stays():
    model, calls = stack(), []
    original = F.scaled_dot_product_attention

    def theirs(*args, **kwargs):
        calls.append(1)
        return original(*args, **kwargs)

    F.scaled_dot_product_attention = theirs
    try:
        with regard.watch(model) as recording:
            model(X)
        assert F.scaled_dot_product_attention is theirs and len(calls) == 2 and len(recording) == 2
    finally:
        F.scaled_dot_product_attention = original


def test_threads_are_kept_apart():
    watched, other = stack(), stack()
    plain = watched(X)
    outputs, barrier = [], threading.Barrier(4)

    def run(model):
        barrier.wait()
        for _ in range(5):
            outputs.append(model(X))

    with regard.watch(watched) as recording:
        threads = [threading.Thread(target=run, args=(model,)) for model in (watched, other) * 2]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(torch.equal(output, plain) for output in outputs) and len(outputs) == 20
    assert len(recording.calls("0")) == len(recording.calls("1")) == 10


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:watch. nothing was recorded")
@pytest.mark.parametrize("runs", [False, True])
def test_many_cycles_leave_memory_as_it_was(runs):
    model = stack()

    def cycles(count: int) -> None:
        with torch.no_grad():
            for _ in range(count):
                with regard.watch(model):
                    if runs:
                        model(X)

    cycles(20)
    gc.collect()
    before = len(gc.get_objects())
    cycles(200)
    gc.collect()
    assert len(gc.get_objects()) <= before + 50
    assert count_hooks(model) == 0


# -- Rejected ---------------------------------------------------------------------------------------------


def test_compiled_models_are_rejected():
    model = stack()
    with pytest.raises(ArgumentError, match=r"torch\.compile has compiled") as error:
        regard.watch(torch.compile(model, backend="eager"))
    assert "_orig_mod" in error.value.hint
    model.compile(backend="eager")
    with pytest.raises(ArgumentError, match=r"torch\.compile has compiled") as error:
        regard.watch(nn.Sequential(model))
    assert "at '0'" in str(error.value) and "load_state_dict" in error.value.hint


@pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0:RuntimeWarning")
def test_a_compiled_function_around_a_model_breaks_at_each_attention():
    model = stack().requires_grad_(False)
    plain = model(X)
    compiled = torch.compile(lambda x: model(x), backend="eager")
    compiled(X)  # compiled before the watch
    with regard.watch(model) as recording:
        output = compiled(X)
    torch.testing.assert_close(output, plain)
    torch.testing.assert_close(compiled(X), plain)
    assert list(recording) == ["0", "1"] and recording.calls("0")[0].query.shape == (2, 4, 7, 8)


def test_wrong_arguments_are_rejected():
    with pytest.raises(
        ArgumentTypeError, match="watch: received the function test_wrong_arguments_are_rejected"
    ):
        regard.watch(test_wrong_arguments_are_rejected)
    with pytest.raises(
        ArgumentTypeError, match="measures as str 'all'; expected a mapping from names to measures"
    ):
        regard.watch(stack(), measures="all")
    with pytest.raises(ArgumentTypeError, match=r"measures as a Entropy; .* regard\.Entropy\(\)"):
        regard.watch(stack(), measures=regard.Entropy())
    with pytest.raises(TypeError, match="keep"):
        regard.watch(stack(), keep="measures")


@pytest.mark.parametrize("use", [lambda w: w["0"], len, iter, list, lambda w: "0" in w, lambda w: w.heads()])
def test_a_watch_used_as_its_recording_names_the_recording(use):
    watching = regard.watch(stack())
    intervention = regard.intervene(stack(), regard.interventions.ablate())
    for block, hint in ((watching, "as recording"), (intervention, "run.recording")):
        with pytest.raises((ArgumentTypeError, AttributeError), match=hint):
            use(block)
        assert block  # its truth does not depend on a length


def test_autocast_and_inference_mode():
    model = stack()
    with torch.autocast("cpu", torch.bfloat16):
        plain = model(X)
        with regard.watch(model) as recording:
            assert torch.equal(model(X), plain)
    assert recording.calls("0")[0].query.dtype == torch.bfloat16
    with torch.inference_mode():
        plain = model(X)
        with regard.watch(model) as recording:
            assert torch.equal(model(X), plain)
    assert recording["0"].mask == causal()


@pytest.mark.parametrize("axes", [(slice(1),), (slice(None), slice(1)), (0,), (0, 0)], ids=str)
@pytest.mark.parametrize("heads", [4, 2])
def test_a_query_that_broadcasts_is_recorded_and_edited_as_the_kernel_reads_it(axes, heads, tmp_path):
    query, key, value = torch.randn(3, 2, 4, 6, 8).unbind()
    query, key, value = query[axes], key[:, :heads], value[:, :heads]
    if heads != 4 and query.shape[-3:-2] != (4,):
        query = torch.randn(1, 4, 6, 8)  # grouped heads do not broadcast
    layer = Attend(lambda *args: F.scaled_dot_product_attention(*args, enable_gqa=heads != 4))
    keys, values = (part.repeat_interleave(4 // heads, 1) for part in (key, value))
    scores = (query @ keys.mT / 8**0.5).clone()
    model = nn.Sequential(layer)
    with regard.watch(model, values=True) as recording:
        layer(query, key, value)
    recording.save(tmp_path / "recording")
    for read in (recording, regard.load_recording(tmp_path / "recording")):
        torch.testing.assert_close(read["0"].to_dense(), scores.softmax(-1))
        assert read["0"].shape == (2, 4, 6, 6)
    assert recording.page() and recording.diagnose() is not None
    assert recording.rollout(query=5, batch=1).shape[-1] == 6
    scores[:, 0, :, 2] = -torch.inf
    with regard.intervene(model, [regard.interventions.knockout(heads=0, keys=2)]):
        output = layer(query, key, value)
    torch.testing.assert_close(output, scores.softmax(-1) @ values)


@pytest.mark.parametrize("seed", range(24))
def test_masks_of_any_shape_save_and_load_to_equal_weights(seed, tmp_path):
    generator = torch.Generator().manual_seed(seed)
    lead = ((), (4,), (1, 1), (2, 1), (1, 4), (2, 4))[seed % 6]
    rows = (1, 6)[seed // 6 % 2]
    mask = torch.rand(*lead, rows, 6, generator=generator) < 0.7
    mask[..., 0] = True
    if seed >= 12:
        mask = torch.where(mask, torch.randn(mask.shape, generator=generator), -torch.inf)
    query, key, value = torch.randn(3, 2, 4, 6, 8, generator=generator).unbind()
    layer = Attend(lambda *args: F.scaled_dot_product_attention(*args, attn_mask=mask))
    with regard.watch(nn.Sequential(layer)) as recording:
        layer(query, key, value)
    recording.save(tmp_path / "recording")
    scores = query @ key.mT / 8**0.5
    expected = (scores + mask if seed >= 12 else scores.masked_fill(~mask, -torch.inf)).softmax(-1)
    for read in (recording, regard.load_recording(tmp_path / "recording")):
        torch.testing.assert_close(read["0"].to_dense(), expected)


@pytest.mark.parametrize("batch, q_len, kv_len", [(0, 6, 6), (2, 6, 0), (2, 0, 6), (0, 0, 0)])
@pytest.mark.parametrize("lead", [(), (1, 1), (1, 4), (None, 1), (None, 4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_masks_of_empty_batches_queries_and_keys(batch, q_len, kv_len, lead, dtype):
    query, key = torch.randn(batch, 4, q_len, 8), torch.randn(batch, 4, kv_len, 8)
    mask = torch.zeros(*(batch if size is None else size for size in lead), q_len, kv_len, dtype=dtype)
    layer = Attend(F.scaled_dot_product_attention)
    with regard.watch(nn.Sequential(layer)) as recording:
        layer(query, key, key, mask)
    assert recording["0"].to_dense().shape == (batch, 4, q_len, kv_len)


def test_values_without_a_heads_axis():
    query, key, value = torch.randn(3, 6, 8).unbind()
    layer = Attend(F.scaled_dot_product_attention)
    with regard.watch(nn.Sequential(layer), values=True) as recording:
        output = layer(query, key, value)
    (call,) = recording.calls("0")
    torch.testing.assert_close(call.matrix @ call.value, output)


@pytest.mark.parametrize("scale", [1e9, 1e10, 1e30])
def test_a_page_of_huge_scores(scale):
    query, key, value = torch.randn(3, 2, 4, 6, 8).unbind()
    layer = Attend(lambda *args: F.scaled_dot_product_attention(*args, scale=scale))
    with regard.watch(nn.Sequential(layer)) as recording:
        layer(query, key, value)
    assert recording.page()


@pytest.mark.parametrize(
    "options",
    [
        {"layers": 3},
        {"layers": ["0", 2]},
        {"layers": b"0"},
        {"measures": {3: regard.Entropy()}},
        {"measures": {"entropy": "entropy"}},
        {"dtype": torch.int32},
        {"dtype": "float32"},
        {"device": "foo"},
        {"device": 1.5},
        {"max_dense_bytes": "1"},
    ],
    ids=str,
)
def test_options_of_another_type_are_refused_when_watch_is_called(options):
    (name,) = options
    with pytest.raises(ArgumentTypeError, match=name):
        regard.watch(stack(), **options)


@pytest.mark.parametrize("layers", [3, ["0", 2], b"0"], ids=str)
def test_analyses_refuse_layers_of_another_type(layers):
    model = stack()
    with regard.watch(model, spans={"prompt": (0, 3)}) as recording:
        model(X)
    for analyse in (recording.page, recording.span_mass, lambda **options: recording.rollout(3, **options)):
        with pytest.raises(ArgumentTypeError, match="layers with"):
            analyse(layers=layers)


def test_a_function_of_measures_that_returns_no_results_is_refused():
    model, error = stack(), pytest.raises(ArgumentTypeError, match="measures that returned a NoneType")
    with error, regard.watch(model, measures=lambda call: None):
        model(X)
