"""`torch.stack` of lazy weights: every index equals that of the dense tensor."""

import numpy as np
import pytest
import torch
import transformers as hf

from regard.errors import ArgumentTypeError, IndexOutOfRangeError
from regard.transformers import AttentionWeights, StackedWeights


@pytest.fixture(scope="module")
def layers():
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=61, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=40, initializer_range=0.3,
    )  # fmt: skip
    model = hf.LlamaForCausalLM._from_config(config, attn_implementation="regard").eval()
    tokens = torch.randint(3, 61, (2, 7), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(tokens, output_attentions=True).attentions


INDICES = [
    (0,),
    (slice(None), -1),
    (slice(None), slice(None), slice(None), 1),
    (1, 0, slice(1, 3), -2, slice(0, 4)),
    (Ellipsis, -1),
    (slice(0, 1), Ellipsis, slice(1, 5), 1),
    (slice(None), 0, slice(None, None, 2), 1, slice(None)),
    (0, Ellipsis, 1, 1),
]
ORDERS = [(0, 1, 2, 3, 4), (0, 4, 3, 1, 2), (4, 1, 0, 2, 3), (2, 0, 1, 3, 4)]


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_every_index_is_that_of_the_dense_tensor(layers, dim):
    dense = torch.stack([layer.to_dense() for layer in layers], dim)
    stacked = torch.stack(layers, dim=dim)
    for order in ORDERS:
        ours, expected = stacked.permute(order), dense.permute(order)
        assert isinstance(ours, StackedWeights)
        assert (ours.shape, ours.ndim, len(ours), ours.dtype) == (
            expected.shape,
            5,
            len(expected),
            expected.dtype,
        )
        torch.testing.assert_close(ours.to_dense(), expected)
        for index in INDICES:
            try:
                found = ours[index]
            except ArgumentTypeError as error:  # a lazy matrix that would have to be transposed
                assert "Select the layer first" in error.hint  # noqa: PT017
                continue
            found = found if isinstance(found, torch.Tensor) else found.to_dense()
            torch.testing.assert_close(found, expected[index], atol=1e-6, rtol=1e-5)


def test_whole_matrices_stay_lazy(layers):
    stacked = torch.stack(layers)
    assert isinstance(stacked[:, 0], StackedWeights)
    assert isinstance(stacked[1], AttentionWeights)
    assert isinstance(stacked.to("cpu").clone().detach().cpu().permute(0, 4, 3, 1, 2), StackedWeights)
    assert stacked.to(torch.float64)[0, 0, 0, 0].dtype is torch.float64
    assert [part.shape for part in stacked] == [layers[0].shape] * 3


def test_what_would_store_the_matrices_is_refused(layers):
    stacked = torch.stack(layers)
    for operation in (lambda: torch.mean(stacked), lambda: np.asarray(stacked)):
        with pytest.raises(ArgumentTypeError, match=r"weights.to_dense\(\)"):
            operation()
    with pytest.raises(AttributeError, match=r"no 'mean'.*weights.to_dense\(\)"):
        stacked.mean(1)
    with pytest.raises(ArgumentTypeError, match="integers, slices"):
        stacked[torch.tensor([0])]
    with pytest.raises(ArgumentTypeError, match="no layer"):
        stacked[3:]
    for index in (3, (0,) * 6):
        with pytest.raises(IndexOutOfRangeError):
            stacked[index]
    with pytest.raises(IndexOutOfRangeError):
        stacked.permute(0, 1)
    with pytest.raises(ArgumentTypeError):
        torch.stack([layers[0], layers[1][:, :2]])


def test_forward_hooks_get_lazy_weights():
    config = hf.LlamaConfig(
        vocab_size=61, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=40
    )
    model = hf.LlamaForCausalLM._from_config(config, attn_implementation="regard").eval()
    tokens = torch.randint(3, 61, (2, 7), generator=torch.Generator().manual_seed(1))
    found = []
    handle = model.model.layers[0].self_attn.register_forward_hook(lambda *call: found.append(call[2][1]))
    with torch.no_grad():
        outputs = model(tokens)
        expected = model(tokens, output_attentions=True).attentions[0]
        handle.remove()
        assert torch.equal(outputs.logits, model(tokens).logits)
    assert outputs.attentions is None
    torch.testing.assert_close(found[0].sum(2), expected.to_dense().sum(2))
    assert isinstance(found[0], AttentionWeights)
