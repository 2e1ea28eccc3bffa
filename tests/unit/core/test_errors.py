"""Wrong calls raise errors that name the operation, the received value, the expected value and a hint."""

from __future__ import annotations

import json

import pytest

import regard
from regard import ArgumentTypeError, RegardError, attention
from tests.helpers.wrong_calls import BUILTIN, MESSAGES_FILE, WRONG, key

MESSAGES = json.loads(MESSAGES_FILE.read_text("utf-8"))


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_raises_an_error_with_four_parts(name):
    with pytest.raises(RegardError) as caught:
        WRONG[name]()
    error = caught.value
    assert isinstance(error, BUILTIN[type(error)])
    assert f"{type(error).__name__}: {error}" == MESSAGES[name]
    assert all((error.operation, error.received, error.expected, error.hint))
    assert (
        str(error) == f"{error.operation}: received {error.received}; expected {error.expected}. {error.hint}"
    )


def test_an_unknown_array_type_is_named_in_the_error():
    class Tensor:
        shape, dtype = (5, 4), "float32"

    with pytest.raises(ArgumentTypeError) as caught:
        attention(Tensor(), key)
    assert "query as an array of float32 with shape (5, 4)" in caught.value.received


def test_every_error_is_a_regard_error():
    assert {kind.__mro__[1] for kind in BUILTIN} == {RegardError}
    assert all(getattr(regard, kind.__name__) is kind for kind in (*BUILTIN, RegardError))
