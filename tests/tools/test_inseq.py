"""inseq: attribution by attention reads lazy weights, with the numbers of eager attention."""

from __future__ import annotations

import pytest
import torch

from tests.tools import long_context
from tests.tools.measuring import measure


@pytest.mark.parametrize("length", [64, 300])
def test_attributions_are_those_of_eager_attention(length):
    eager, ours = (long_context.attribute(name, length) for name in ("eager", "regard"))
    assert ours.shape == eager.shape
    assert ours.shape[1:] == (long_context.GENERATED, 3, 4)
    assert float(eager.nan_to_num().max()) > 0.01
    torch.testing.assert_close(ours, eager, atol=1e-5, rtol=1e-4, equal_nan=True)


def test_8192_tokens_are_attributed_as_with_eager_attention():
    eager, ours = (long_context.attribute(name, 8192) for name in ("eager", "regard"))
    assert ours.shape == (8192, long_context.GENERATED, 1, 2)
    torch.testing.assert_close(ours, eager, atol=1e-5, rtol=1e-4, equal_nan=True)


def test_8192_tokens_in_memory_that_grows_with_the_length(capsys):
    with capsys.disabled():
        print()
        peaks = {name: measure("inseq", name, 8192) for name in ("regard", "eager")}
    assert peaks["regard"] < 200
    assert peaks["eager"] > 1000  # 2 heads · 8192² · 4 bytes are 512 MiB for each tensor of weights
