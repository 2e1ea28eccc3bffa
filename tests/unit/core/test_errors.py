"""Wrong calls raise errors that name the operation, the received value, the expected value and a hint."""

from __future__ import annotations

import builtins
import inspect
import re
from importlib import import_module
from typing import Any

import numpy as np
import pytest

import regard
from regard import ArgumentError, ArgumentTypeError, AttentionMatrix, RegardError, attention
from tests.helpers.wrong_calls import BUILTIN, OTHER_ERRORS, WRONG, A, heads, key, large, query

CLASSES = {name: kind for kind, names in OTHER_ERRORS.items() for name in names}
PLACES = (regard, regard.masks, regard.score_mods)
FUNCTIONS = [getattr(it, name) for it in PLACES for name in it.__all__] + [*vars(AttentionMatrix).values()]
KEYWORDS = {name for it in FUNCTIONS if inspect.isfunction(it) for name in inspect.signature(it).parameters}


def exists(module: Any, path: str) -> bool:
    """Return whether a dotted path leads to something, through modules that are imported on first access."""
    for part in path.split("."):
        module = getattr(module, part, None)
    return module is not None


def find_unknown_names(hint: str) -> list[str]:
    """List the functions, methods and keywords that a hint names and that do not exist."""
    dotted = re.findall(r"\b(regard|numpy)\.([\w.]*\w)", hint)
    functions = re.findall(r"(?<![\w.])(\w+)\(", hint)
    methods = re.findall(r"(?:\bA|\])\.(\w+)", hint)
    keywords = re.findall(r"\b(\w+)=(?!=)", hint) if ".measure(" not in hint else []  # which takes any name
    return [
        *(f"{module}.{path}" for module, path in dotted if not exists(import_module(module), path)),
        *(name for name in functions if not any(hasattr(place, name) for place in (regard, builtins, np))),
        *(f"A.{name}" for name in methods if not hasattr(AttentionMatrix, name)),
        *(f"{name}=" for name in keywords if name not in KEYWORDS),
    ]


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_raises_an_error_with_four_parts(name):
    with pytest.raises(RegardError) as caught:
        WRONG[name]()
    error = caught.value
    assert type(error) is CLASSES.get(name, ArgumentError) and isinstance(error, BUILTIN[type(error)])
    parts = (error.operation, error.received, error.expected, error.hint)
    assert all(part.strip() == part and part for part in parts)
    assert all(part in str(error) for part in parts)
    assert find_unknown_names(error.hint) == []


def test_every_listed_class_belongs_to_a_wrong_call():
    assert CLASSES.keys() <= WRONG.keys() and len(CLASSES) == sum(map(len, OTHER_ERRORS.values()))


@pytest.mark.parametrize(
    ("hint", "unknown"),
    [
        ("Call regard.engines.register(MyEngine), or numpy.asarray(array).", []),
        ("Use regard.engines.registered(it).", ["regard.engines.registered"]),
        ("Wrap it: densify(array).", ["densify"]),
        ("Take A[0, 0].explain(3), A.coarsen(512) or A[rows].topmost(2).", ["A.topmost"]),
        ("For fewer key heads set gqa=True, and align=...", ["gqa="]),
    ],
)
def test_names_that_do_not_exist_are_found_in_a_hint(hint, unknown):
    assert find_unknown_names(hint) == unknown


def test_an_unknown_array_type_is_named_in_the_error():
    class Tensor:
        shape, dtype = (5, 4), "float32"

    with pytest.raises(ArgumentTypeError) as caught:
        attention(Tensor(), key)
    assert "query as an array of float32 with shape (5, 4)" in caught.value.received


def test_every_error_is_a_regard_error():
    assert {kind.__mro__[1] for kind in BUILTIN} == {RegardError}
    assert all(getattr(regard, kind.__name__) is kind for kind in (*BUILTIN, RegardError))


# What was called, and a wrong call of it.
OPERATIONS = [
    ("bool(A)", lambda: bool(A)),
    ("A != other", lambda: A != key),
    ("item in A", lambda: 0.5 in A),
    ("A.to", lambda: A.to("cpu")),
    ("argmax", lambda: heads.argmax(axis=0)),
    ("diagonal", lambda: A.diagonal(1.5)),
    ("page", lambda: heads.page()),
    ("as_linear_operator", lambda: heads.as_linear_operator()),
    ("A.mT[index]", lambda: large.mT[:15_000]),
    ("explain", lambda: A.explain("cat")),
    ("explain", lambda: A.explain([0, 1])),
    ("mask", lambda: attention(query, key, mask=regard.masks.mask(lambda b, h, q, k: q - k)) @ key),
    ("mask", lambda: attention(query, key, mask=regard.masks.mask(lambda b, h, q, k: (q >= k)[..., :2])) @ key),
    ("mask", lambda: attention(query, key, mask=regard.masks.mask(lambda b, h, q, k: q >= k and k > 0)) @ key),
]  # fmt: skip


@pytest.mark.parametrize(("operation", "call"), OPERATIONS)
def test_an_error_names_the_operation_and_says_what_to_do(operation, call):
    with pytest.raises(RegardError) as caught:
        call()
    assert caught.value.operation == operation and caught.value.hint


@pytest.mark.parametrize("method", ["page", "as_linear_operator"])
def test_the_hint_for_several_heads_is_the_call_for_one(method):
    with pytest.raises(ArgumentError, match=rf"Choose one: A\[0, 0\]\.{method}\("):
        getattr(heads, method)()


def test_the_hint_of_explain_depends_on_what_it_got():
    with pytest.raises(ArgumentTypeError, match=r"tokens\.index\('cat'\)"):
        A.explain("cat")
    with pytest.raises(ArgumentTypeError, match="in a loop"):
        A.explain([0, 1])


def test_an_attribute_of_arrays_leads_to_the_dense_weights_and_another_name_to_nothing():
    with pytest.raises(AttributeError, match=r"A\.to_dense\(\)\.tolist works"):
        A.tolist  # noqa: B018
    for name in ("nonsense", "_nonsense", "__array_struct__"):
        with pytest.raises(AttributeError) as caught:
            getattr(A, name)
        assert "to_dense" not in str(caught.value)


def test_an_unknown_keyword_is_named_beside_those_that_exist():
    with pytest.raises(ArgumentTypeError, match="received the argument masks; expected query, key, mask, "):
        attention(query, key, mask=None, masks=None)
