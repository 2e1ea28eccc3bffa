"""Wrong calls raise errors that name the operation, the received value, the expected value and a hint."""

from __future__ import annotations

import pytest

import regard
from regard import ArgumentTypeError, RegardError, attention
from tests.helpers.wrong_calls import BUILTIN, ODD, WRONG, key


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_raises_an_error_with_four_parts(name):
    wrong = WRONG[name]
    with pytest.raises(BUILTIN[wrong.kind]) as caught:
        wrong.call()
    error = caught.value
    assert type(error) is wrong.kind
    assert error.operation == wrong.operation
    for part_name in ("received", "expected", "hint"):
        for words in getattr(wrong, part_name).split("|"):
            assert words in getattr(error, part_name), part_name
    assert (
        str(error) == f"{error.operation}: received {error.received}; expected {error.expected}. {error.hint}"
    )


@pytest.mark.parametrize("name", ODD)
def test_an_odd_call_raises_an_error_with_four_parts(name):
    with pytest.raises(RegardError) as caught:
        ODD[name]()
    error = caught.value
    assert type(error) in BUILTIN and isinstance(error, BUILTIN[type(error)])
    for words in (error.operation, error.received, error.expected, error.hint):
        assert words and words in str(error)


def test_an_unknown_array_type_is_named_in_the_error():
    class Tensor:
        shape, dtype = (5, 4), "float32"

    with pytest.raises(ArgumentTypeError) as caught:
        attention(Tensor(), key)
    assert "query as an array of float32 with shape (5, 4)" in caught.value.received


def test_every_error_is_a_regard_error():
    assert {kind.__mro__[1] for kind in BUILTIN} == {RegardError}
    assert all(getattr(regard, kind.__name__) is kind for kind in (*BUILTIN, RegardError))
