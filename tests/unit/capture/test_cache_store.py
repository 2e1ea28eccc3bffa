"""`KeyStore`: keys of all steps are stored once, and stay as they were."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch import nn  # noqa: E402

import regard  # noqa: E402
from regard import ArgumentError  # noqa: E402
from regard.capture import cache_store  # noqa: E402
from regard.capture.cache_store import KeyStore  # noqa: E402


@pytest.fixture
def keys():
    return torch.randn(2, 3, 13, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("is_compiled", [True, False])
def test_a_growing_cache(keys, is_compiled, monkeypatch):
    if not is_compiled:
        monkeypatch.setattr(cache_store, "load_library", lambda: None)
    store = KeyStore(keys[..., :7, :].clone(), 7)
    assert [store.try_append(keys[..., :n, :], 1, n) for n in range(8, 14)] == [0] * 6
    assert torch.equal(store.read(0, 13), keys) and torch.equal(store.read(0, 9), keys[..., :9, :])
    assert store.nbytes <= keys[..., 0, :].nbytes * (13 + 256 + 4)


def test_a_window(keys):
    store = KeyStore(keys[..., :7, :].clone(), 7)
    starts = [store.try_append(keys[..., n - 5 : n, :], 1, 5) for n in range(8, 14)]
    assert starts == [3, 4, 5, 6, 7, 8]
    assert torch.equal(store.read(8, 5), keys[..., 8:, :])
    assert torch.equal(store.read(0, 7), keys[..., :7, :])


def test_a_buffer_that_is_written_to(keys):
    buffer = torch.zeros(2, 3, 16, 4)
    buffer[..., :7, :] = keys[..., :7, :]
    store = KeyStore(buffer, 7)
    for n in range(8, 14):
        buffer[..., n - 1, :] = keys[..., n - 1, :]
        assert store.try_append(buffer, 1, n) == 0
    buffer.zero_()
    assert torch.equal(store.read(0, 13), keys)
    assert store.read(0, 16).shape[-2] == 16 and not store.read(13, 3).any()


def test_several_tokens_in_one_step(keys):
    store = KeyStore(keys[..., :5, :].clone(), 5)
    assert store.try_append(keys[..., :9, :], 4, 9) == 0
    assert store.try_append(keys[..., 4:12, :], 3, 8) == 4
    assert torch.equal(store.read(0, 12), keys[..., :12, :])


def test_keys_of_an_encoder_are_shared(keys):
    store = KeyStore(keys.clone(), 13)
    size = store.nbytes
    assert store.try_append(keys, 1, 13) == 0 and store.try_append(keys, 5, 13) == 0
    assert store.nbytes == size and store.count == 13


def test_nan_equals_itself(keys):
    keys[0, 0, 2] = torch.nan
    store = KeyStore(keys[..., :7, :].clone(), 7)
    assert store.try_append(keys[..., :8, :], 1, 8) == 0


@pytest.mark.parametrize("change", ["number", "length", "heads", "dtype", "cropped"])
def test_other_keys_begin_a_new_store(keys, change):
    store = KeyStore(keys[..., :7, :].clone(), 7)
    key, used = keys[..., :8, :].clone(), 8
    if change == "number":
        key[1, 2, 3, 0] += 1  # one of 336
    elif change == "length":
        key, used = keys[..., :9, :], 9
    elif change == "heads":
        key = key[:, :2]
    elif change == "dtype":
        key = key.double()
    else:
        key, used = keys[..., :6, :], 6
    assert store.try_append(key, 1, used) is None
    assert store.count == 7 and torch.equal(store.read(0, 7), keys[..., :7, :])


def test_a_tensor_of_the_model_that_changes_is_noticed(keys):
    store = KeyStore(held := keys.clone())
    assert store.read(0, 13) is not None
    held.add_(1)
    with pytest.raises(ArgumentError, match="the model overwrote after the call"):
        store.read(0, 13)


def test_inference_mode(keys):
    with torch.inference_mode():
        buffer = keys.clone()
        store = KeyStore(buffer, 7)
        buffer.zero_()
    assert torch.equal(store.read(0, 7), keys[..., :7, :])
    with torch.inference_mode():
        assert store.try_append(keys[..., :8, :].clone(), 1, 8) == 0
    assert torch.equal(store.read(0, 8), keys[..., :8, :]) and not store.read(0, 8).is_inference()


@pytest.mark.parametrize("own_softmax", [False, True])
@pytest.mark.parametrize("lengths, num_calls", [((6, 6, 6), 3), ((2, 1, 1), 1), ((1, 1, 1), 1), ((4, 4), 1)])
def test_passes_with_one_key_tensor_are_joined_unless_each_is_a_whole_sequence(
    own_softmax, lengths, num_calls
):
    """A decoder's steps have the keys of its encoder; passes of as many queries as keys are the sequence again."""

    class Attention(nn.Module):
        def forward(self, query, key, value):
            if own_softmax:
                return torch.softmax(query @ key.mT / 8**0.5, -1) @ value
            return nn.functional.scaled_dot_product_attention(query, key, value)

    model = nn.Sequential(Attention())
    key, value = torch.randn(2, 2, 4, 6, 8).unbind()
    queries = [torch.randn(2, 4, length, 8) for length in lengths]
    with regard.watch(model) as recording:
        for query in queries:
            model[0](query, key, value)
    calls = recording.calls("0")
    assert len(calls) == num_calls
    rows = torch.cat([call.matrix.to_dense() for call in calls], -2)
    torch.testing.assert_close(rows, torch.softmax(torch.cat(queries, -2) @ key.mT / 8**0.5, -1))


def make_layouts(x):
    """Return tensors with the numbers of one, (2, 3, 5, 4), in several layouts."""
    wide = torch.zeros(4, 3, 9, 4)
    wide[::2, :, 2:7] = x
    return {
        "contiguous": x.clone(),
        "a window": torch.nn.functional.pad(x, (0, 0, 3, 2))[:, :, 3:8],
        "every second entry of a buffer": wide[::2, :, 2:7],
        "heads last": x.transpose(1, 2).contiguous().transpose(1, 2),
        "transposed": x.mT.contiguous().mT,
        "part of each row": torch.nn.functional.pad(x, (1, 1))[..., 1:5],
        "one head, repeated": x[:, :1].expand(2, 3, 5, 4),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_keys_are_compared_bit_by_bit_in_any_layout(dtype):
    x = torch.randn(2, 3, 5, 4, generator=torch.Generator().manual_seed(1))
    x[1, 2, 3, 0] = torch.nan
    for name, a in make_layouts(x).items():
        a = a.to(dtype, memory_format=torch.preserve_format)
        for other, b in make_layouts(a.float()).items():
            b = b.to(dtype, memory_format=torch.preserve_format)
            expected = have_same_integers(a, b)
            assert cache_store.have_same_bits(a, b) == expected, (name, other)
            for place in ((0, 0, 0, 0), (1, 2, 4, 3), (1, 0, 2, 1)):
                changed = b.contiguous().clone()
                changed[place] += 1
                assert not cache_store.have_same_bits(a, changed), (name, other, place)


def have_same_integers(a, b):
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.dtype.itemsize]
    return bool((a.contiguous().view(integer) == b.contiguous().view(integer)).all())
