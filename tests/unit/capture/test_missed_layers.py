"""A layer whose attention is out of sight is captured or reported, even if other layers are captured."""

from __future__ import annotations

import importlib
import sys
import types
from functools import partial

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import regard  # noqa: E402
from regard import NotCapturedError  # noqa: E402
from regard.capture import patching, watchers  # noqa: E402
from tests.helpers import imported_attention  # noqa: E402

X = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def check_nothing_stays_patched():
    before = (torch.softmax, imported_attention.scaled_dot_product_attention)
    yield
    assert before == (torch.softmax, imported_attention.scaled_dot_product_attention)
    assert "softmax" not in vars(torch.Tensor)
    assert not watchers.watched and not patching.list_patches()


class Mixer(nn.Module):
    """Causal self-attention; `attend` computes it."""

    def __init__(self, attend) -> None:
        super().__init__()
        self.qkv, self.attend, self.softmax = nn.Linear(32, 96), attend, nn.Softmax(-1)

    def forward(self, x):
        query, key, value = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        if self.attend == "module":
            return (self.softmax(query @ key.mT) @ value).transpose(1, 2).flatten(2)
        return self.attend(query, key, value).transpose(1, 2).flatten(2)


def by_attribute(query, key, value):
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


OWN_SOFTMAX = {
    "method": lambda query, key, value: (query @ key.mT).softmax(-1) @ value,
    "torch": lambda query, key, value: torch.softmax(query @ key.mT, dim=-1) @ value,
    "functional": lambda query, key, value: F.softmax(query @ key.mT, 3, dtype=torch.float32) @ value,
    "module": "module",
}


@pytest.mark.parametrize("how", OWN_SOFTMAX)
def test_a_layer_of_any_name_that_computes_its_own_softmax_is_read(how):
    model = nn.Sequential(Mixer(by_attribute), Mixer(OWN_SOFTMAX[how]))
    expected = model(X)
    with regard.watch(model) as recording:
        assert torch.equal(model(X), expected)
    assert list(recording) == ["0", "1"] and recording.calls("1")[0].weights is not None


def pool(query, key, value):
    """A softmax whose rows are averaged: it reaches the value, but no product with it."""
    weights = (query @ key.mT).softmax(-1)
    return weights.mean(-2).unsqueeze(-1) * value


def test_a_softmax_that_reaches_no_product_is_reported():
    model = nn.Sequential(Mixer(by_attribute), Mixer(pool))
    expected = model(X)
    with (
        pytest.raises(
            NotCapturedError, match="'1' was not captured: Mixer computes a softmax of shape"
        ) as error,
        regard.watch(model) as recording,
    ):
        assert torch.equal(model(X), expected)
    assert "F.scaled_dot_product_attention" in error.value.hint
    assert list(recording) == ["0"]
    assert [finding.module for finding in recording.diagnose() if finding.kind == "not captured"] == ["1"]
    with regard.watch(model, layers="0"):
        model(X)


def hold_in_closure(function):
    def attend(query, key, value):
        return function(query, key, value)

    return attend


def hold_in_default(query, key, value, function=F.scaled_dot_product_attention):
    return function(query, key, value)


def hold_in_keyword(query, key, value, *, function=F.scaled_dot_product_attention):
    return function(query, key, value)


FUNCTIONS = {"sdpa": F.scaled_dot_product_attention}
HELD = {
    "partial": partial(F.scaled_dot_product_attention, is_causal=True),
    "closure": hold_in_closure(F.scaled_dot_product_attention),
    "default": hold_in_default,
    "keyword": hold_in_keyword,
    "dictionary": lambda query, key, value: FUNCTIONS["sdpa"](query, key, value),
    "closure of a partial of a function": hold_in_closure(partial(hold_in_default)),
}


@pytest.mark.parametrize("how", HELD)
def test_a_function_that_another_function_holds_is_captured_once(how):
    original = F.scaled_dot_product_attention
    model = nn.Sequential(Mixer(by_attribute), Mixer(HELD[how]))
    expected = model(X)
    with regard.watch(model) as outer, regard.watch(model) as recording:
        assert torch.equal(model(X), expected)
    for seen in (outer, recording):
        assert [len(seen.calls(name)) for name in seen] == [1, 1]
    assert HELD["partial"].func is original and HELD["closure"].__closure__[0].cell_contents is original
    assert hold_in_default.__defaults__ == (original,) and FUNCTIONS["sdpa"] is original
    assert hold_in_keyword.__kwdefaults__ == {"function": original}


@pytest.mark.parametrize(
    "attend", [imported_attention.attend, imported_attention.scaled_dot_product_attention]
)
def test_a_function_that_a_helper_imported_by_name_is_captured(attend):
    model = nn.Sequential(Mixer(by_attribute), Mixer(attend))
    expected = model(X)
    with regard.watch(model) as recording:
        assert torch.equal(model(X), expected)
    assert list(recording) == ["0", "1"] and model[1].attend is attend


def test_names_that_are_bound_between_two_watches_are_found(tmp_path, monkeypatch):
    """Modules without the function are not read again, unless they are new, have grown, or are not installed."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    for name in ("regard_test_grown", "regard_test_new"):
        (folder / f"{name}.py").write_text("def attend(*args): return sdpa(*args)\n")
        monkeypatch.delitem(sys.modules, name, raising=False)
    grown, model = importlib.import_module("regard_test_grown"), nn.Sequential(Mixer(by_attribute))
    with regard.watch(model):
        model(X)
    assert "regard_test_grown" in patching._clean_names
    new = importlib.import_module("regard_test_new")
    grown.sdpa = new.sdpa = F.scaled_dot_product_attention
    monkeypatch.setattr(imported_attention, "attend", F.scaled_dot_product_attention)  # bound anew
    for attend in (grown.attend, new.attend, lambda *args: imported_attention.attend(*args)):
        model = nn.Sequential(Mixer(attend))
        with regard.watch(model) as recording:
            model(X)
        assert list(recording) == ["0"]


def test_a_softmax_that_is_no_attention_is_not_reported():
    class Router(nn.Module):
        def forward(self, x):
            return x * x.softmax(-1).amax(-1, keepdim=True)

    model = nn.Sequential(Mixer(by_attribute), Router())
    with regard.watch(model) as recording:
        model(X)
    assert list(recording) == ["0"] and not recording.diagnose().by_severity("warning")


def count_calls(function):
    """Return how many functions of Python a call runs."""
    calls, before = 0, sys.getprofile()

    def count(frame, event, _):
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(before)
    return calls


def test_entering_a_watch_again_does_not_search_all_modules(monkeypatch):
    model = nn.Sequential(*(Mixer(by_attribute) for _ in range(4)))

    def enter():
        with regard.watch(model):
            model(X)

    enter()
    first = count_calls(enter)
    for i in range(500):  # installed modules without the function
        module = types.ModuleType(f"regard_test_module_{i}")
        module.__file__ = f"/site-packages/regard_test_module_{i}.py"
        monkeypatch.setitem(sys.modules, module.__name__, module)
    enter()  # reads them
    assert count_calls(enter) < first + 100


def test_a_module_that_is_imported_again_is_read_again(tmp_path, monkeypatch):
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    file, model = folder / "regard_test_again.py", nn.Sequential(Mixer(by_attribute))
    file.write_text("sdpa = None\n")
    importlib.import_module("regard_test_again")
    for _ in range(2):
        with regard.watch(model):
            model(X)
    monkeypatch.delitem(sys.modules, "regard_test_again")
    file.write_text("from torch.nn.functional import scaled_dot_product_attention as sdpa  # another size\n")
    importlib.invalidate_caches()
    again = importlib.import_module("regard_test_again")
    model = nn.Sequential(Mixer(lambda *args: again.sdpa(*args)))
    with regard.watch(model) as recording:
        model(X)
    assert list(recording) == ["0"]
    assert again.sdpa is F.scaled_dot_product_attention


def test_a_name_that_an_installed_file_of_the_model_binds_anew_is_found(tmp_path, monkeypatch):
    """The file of the model's class has as many names as before."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    (folder / "regard_test_model.py").write_text(
        "from torch import nn\nattend = None\nclass Mixer(nn.Module):\n    def forward(self, x):\n"
        "        x = x.unflatten(-1, (2, -1)).transpose(1, 2)\n        return attend(x, x, x).flatten(2)\n"
    )
    file = importlib.import_module("regard_test_model")
    monkeypatch.setitem(sys.modules, "regard_test_model", file)
    model, x = nn.Sequential(file.Mixer()), torch.randn(1, 5, 8)
    for _ in range(2):
        file.attend = lambda query, key, value: value
        with pytest.raises(NotCapturedError), regard.watch(model):
            model(x)
        file.attend = F.scaled_dot_product_attention
        for _ in range(2):
            with regard.watch(model) as outer, regard.watch(model) as recording:
                model(x)
            assert list(outer) == list(recording) == ["0"]
        assert file.attend is F.scaled_dot_product_attention
