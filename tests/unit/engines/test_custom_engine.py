"""A registered engine: a small array library, tested with the generated cases of the built-in engines."""

from __future__ import annotations

import operator
from types import SimpleNamespace

import numpy as np
import pytest

import regard
from regard import ArgumentTypeError
from regard.engines import ArrayEngine, register, registry
from regard.testing import build_inputs, check_case, draw_cases
from regard.tiling import use_tile_sizes


class Far:
    """An array on another device, like a GPU's: it mixes with plain numbers, and only `get` converts it to NumPy."""

    __array_ufunc__ = None  # NumPy's operators defer to it

    def __init__(self, data):
        self._data = data

    def __array__(self, *_, **__):
        raise TypeError("a Far array does not convert to NumPy implicitly: use .get()")

    def get(self):
        return self._data.copy()

    @property
    def shape(self):
        return self._data.shape

    @property
    def ndim(self):
        return self._data.ndim

    @property
    def dtype(self):
        return self._data.dtype

    def reshape(self, shape):
        return Far(self._data.reshape(shape))

    def swapaxes(self, a, b):
        return Far(self._data.swapaxes(a, b))

    def __len__(self):
        return len(self._data)

    def __bool__(self):
        return bool(self._data)

    def __int__(self):
        return int(self._data)

    def __float__(self):
        return float(self._data)

    def __getitem__(self, index):
        return Far(np.asarray(self._data[unwrap(index)]))

    def __setitem__(self, index, values):
        self._data[unwrap(index)] = unwrap_operand(values)


def unwrap(argument):
    """Replace Far arrays by their data; indices may be NumPy arrays."""
    if isinstance(argument, list | tuple):
        return type(argument)(map(unwrap, argument))
    return argument._data if isinstance(argument, Far) else argument


def unwrap_operand(operand):
    """Unwrap the other operand: a Far array or a number, as on a GPU."""
    if isinstance(operand, np.ndarray) and operand.ndim:
        raise TypeError("a Far array and a NumPy array do not mix")
    return unwrap(operand)


def _operator(function, swapped=False):
    def apply(self, other):
        sides = (unwrap_operand(other), self._data) if swapped else (self._data, unwrap_operand(other))
        return Far(np.asarray(function(*sides)))

    return apply


_NAMES = (
    "add",
    "sub",
    "mul",
    "truediv",
    "pow",
    "matmul",
    "and_",
    "or_",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "mod",
)
for _name in _NAMES:
    _function, _name = getattr(operator, _name), _name.rstrip("_")
    setattr(Far, f"__{_name}__", _operator(_function))
    setattr(Far, f"__r{_name}__", _operator(_function, swapped=True))
Far.__neg__ = lambda self: Far(-self._data)
Far.__invert__ = lambda self: Far(~self._data)
Far.__hash__ = None


class Library:
    """The functions of the array API on Far arrays; only `asarray` takes NumPy arrays."""

    def isdtype(self, dtype, kind):
        return kind == "real floating" if dtype.name == "bfloat16" else np.isdtype(dtype, kind)

    def __getattr__(self, name):
        attribute = getattr(np, name)
        if not callable(attribute) or isinstance(attribute, type) or name in ("finfo", "result_type"):
            return attribute

        def function(*args, **kwargs):
            for argument in (*args, *kwargs.values()):
                if isinstance(argument, np.ndarray) and argument.ndim and name != "asarray":
                    raise TypeError(f"{name} got a NumPy array")
            result = attribute(*map(unwrap, args), **kwargs)
            return Far(np.asarray(result)) if isinstance(result, np.ndarray | np.generic) else result

        return function


class FarEngine(ArrayEngine):
    name, xp = "far", Library()

    def owns(self, array):
        return isinstance(array, Far)

    def to_numpy(self, array):
        return array.get() if isinstance(array, Far) else np.asarray(array)


@pytest.fixture(autouse=True)
def far(monkeypatch):
    monkeypatch.setattr(registry, "_REGISTERED", {})
    register(FarEngine())


def test_the_generated_cases_pass_on_a_registered_engine():
    pytest.importorskip("ml_dtypes")
    cases = [case for case, possible in draw_cases(60, seed=7, tile=16) if possible]
    with use_tile_sizes(rows=64, columns=32):  # so small that the matrices of the cases have several tiles
        failures = [
            failure for case in cases for failure in check_case(case, build_inputs(case, 16), ["far"])
        ]
    assert failures == []
    assert len(cases) == 60


def data(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def test_what_comes_out_is_of_the_library():
    query, key, value = (Far(data(2, 3, 40, 8, seed=seed)) for seed in range(3))
    A = regard.attention(query, key, mask=regard.causal())
    B = regard.attention(query.get(), key.get(), mask=regard.causal())
    assert A.kernel == "far: block loop"
    pairs = {
        "product": (A @ value, B @ value.get()),
        "row": (A[1, 2, 5], B[1, 2, 5]),
        "some": (A[:, 1, [3, 30], 7:9], B[:, 1, [3, 30], 7:9]),
        "lse": (A.lse, B.lse),
        "transposed": (A.mT @ value, B.mT @ value.get()),
        "top": (A.topk(3).values, B.topk(3).values),
        "where": (A.topk(3).indices, B.topk(3).indices),
        "spread": (A.measure(regard.Spread()).spread, B.measure(regard.Spread()).spread),
        "coarse": (A.coarsen(7, "max"), B.coarsen(7, "max")),
        "largest": (A.max(axis=-2), B.max(axis=-2)),
        "merged": (regard.merge_states([(A @ value, A.lse)])[0], B @ value.get()),
        "linear": (
            regard.linear_attention(query, key) @ value,
            regard.linear_attention(query.get(), key.get()) @ value.get(),
        ),
    }
    for name, (theirs, ours) in pairs.items():
        assert isinstance(theirs, Far), name
        np.testing.assert_allclose(theirs.get(), ours, rtol=1e-12, atol=1e-14, err_msg=name)
    assert repr(A.lazy[0, 0, :2]).splitlines()[1:] == repr(B.lazy[0, 0, :2]).splitlines()[1:]
    assert str(A.lazy[0, 0].explain(3)) == str(B.lazy[0, 0].explain(3))
    np.testing.assert_allclose(np.asarray(A), B.to_dense())


def test_integers_become_floats_and_booleans_are_refused():
    one = Far(np.ones((2, 2), int))
    assert regard.attention(one, [[1, 2]]).dtype == np.float64
    with pytest.raises(ArgumentTypeError) as caught:
        regard.attention(Far(np.ones((2, 2), bool)), one)
    assert "bool" in caught.value.received and "(2, 2)" in caught.value.received
    assert "floating-point" in caught.value.hint


def test_a_registered_name_is_replaced():
    other = FarEngine()
    register(other)
    assert list(registry._REGISTERED.values()) == [other]


def test_unregistered_arrays_are_refused(monkeypatch):
    monkeypatch.setattr(registry, "_REGISTERED", {})
    with pytest.raises(
        ArgumentTypeError, match=r"from tests\.unit\.engines\.test_custom_engine.*register an engine"
    ):
        regard.attention(Far(np.ones((1, 1))), [[1.0]])
    case, _ = next(draw_cases(1, seed=0, tile=8))
    assert "Register it first" in check_case(case, build_inputs(case, 8), ["far"])[0]


class Nameless(FarEngine):
    name = ""


@pytest.mark.parametrize(
    ("engine", "received"),
    [
        (FarEngine, "class FarEngine"),
        (SimpleNamespace(name="mine", owns=len), "SimpleNamespace without xp, is_asynchronous, to_numpy"),
        (Nameless(), "Nameless named ''"),
    ],
)
def test_an_object_that_is_no_engine_is_refused(engine, received):
    with pytest.raises(ArgumentTypeError) as caught:
        register(engine)
    assert caught.value.operation == "register" and received in caught.value.received
    assert "regard.engines.ArrayEngine" in caught.value.hint


@pytest.mark.parametrize(
    ("names", "expected"),
    [((), "none is registered"), (("far", "near"), "'far', 'near'")],
)
def test_an_unknown_engine_is_refused(names, expected, monkeypatch):
    monkeypatch.setattr(registry, "_REGISTERED", dict.fromkeys(names, FarEngine()))
    with pytest.raises(ArgumentTypeError) as caught:
        registry.get_engine("mine")
    assert "'mine'" in caught.value.received and expected in caught.value.expected
    assert "regard.engines.register(" in caught.value.hint


@pytest.mark.parametrize("method", ["owns", "to_numpy"])
def test_a_missing_method_is_named(method):
    with pytest.raises(TypeError, match=f"Half must define {method}"):
        getattr(type("Half", (ArrayEngine,), {"name": "half"})(), method)(1.0)


def test_a_leaked_numpy_array_would_raise():
    """The library refuses NumPy arrays and implicit conversions, as a GPU library does."""
    one = Far(np.ones(2))
    for wrong in (lambda: one + np.ones(2), lambda: np.asarray(one), lambda: Library().sum(np.ones(2))):
        with pytest.raises(TypeError):
            wrong()
