"""Public names: `__all__`, `dir()`, `__module__`, the type checker and the reference pages agree."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import regard

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs/_ext"))

pytest.importorskip("transformers")  # regard.transformers needs it, and nn and lens need torch

# Classes of regard.learn are written to be read: inspect.getsource finds them by the module that defines them.
SHOWS_SOURCE = "regard.learn"


def list_exports(module: types.ModuleType) -> list[str]:
    """List the public names of a module; those that regard imports on first access are not in its `__all__`."""
    return [name for name in dir(regard) if name != "__version__"] if module is regard else module.__all__


def list_modules(module: types.ModuleType = regard) -> Iterator[types.ModuleType]:
    """List a module and the modules with an `__all__` that it exports, recursively."""
    yield module
    for name in list_exports(module):
        exported = getattr(module, name)
        if isinstance(exported, types.ModuleType) and hasattr(exported, "__all__"):
            yield from list_modules(exported)


def list_objects() -> Iterator[tuple[types.ModuleType, str, Any]]:
    """List the exported functions and classes with the module that exports them."""
    for module in list_modules():
        for name in list_exports(module):
            exported = getattr(module, name)
            if inspect.isclass(exported) or inspect.isroutine(exported):
                yield module, name, exported


def test_dir_lists_the_exported_names():
    assert set(regard.__all__) < set(dir(regard)) and "__version__" in dir(regard)
    assert dir(regard) == sorted(set(dir(regard))) and regard.__all__ == sorted(set(regard.__all__))


IMPORT_ALL = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in ALLOWED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

ALLOWED = {*sys.stdlib_module_names, "numpy", "regard"}
sys.meta_path.insert(0, Refuse())
import regard
after_import = set(sys.modules)
from regard import *
assert set(sys.modules) == after_import, sorted(set(sys.modules) - after_import)
assert {name for name in dir() if name in dir(regard)} == set(regard.__all__)
print(attention([[1.0]], [[1.0]], mask=causal()).measure(Entropy()).entropy.tolist())
"""


def test_a_star_import_needs_numpy_only():
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL], capture_output=True, text=True)
    assert done.stderr == "" and done.stdout == "[0.0]\n"


def test_a_star_import_loads_no_optional_package():
    code = (
        "import sys; from regard import *; print({'torch', 'transformers', 'matplotlib'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr == "" and done.stdout == "set()\n"


@pytest.mark.parametrize("name", list_exports(regard))
def test_an_exported_name_can_be_imported(name):
    assert getattr(importlib.import_module("regard"), name) is getattr(regard, name)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'regard' has no attribute 'seen'"):
        regard.seen  # noqa: B018


def test_exported_objects_have_the_path_of_a_public_package():
    packages = {module.__name__ for module in list_modules()}
    exports = [export for export in list_objects() if not export[0].__name__.startswith(SHOWS_SOURCE)]
    assert len(exports) > 100
    for module, name, exported in exports:
        expected = {"regard"} if module is regard else packages
        assert exported.__module__ in expected, f"{module.__name__}.{name}"
        if not name.startswith("_") and "<locals>" not in exported.__qualname__:
            public = importlib.import_module(exported.__module__)
            assert getattr(public, exported.__qualname__) is exported, f"{module.__name__}.{name}"


def test_no_function_has_the_name_of_a_module():
    for module in list_modules():
        for name in list_exports(module):
            if not isinstance(getattr(module, name), types.ModuleType) and hasattr(module, "__path__"):
                assert importlib.util.find_spec(f"{module.__name__}.{name}") is None, (
                    f"{module.__name__}.{name}"
                )


def test_the_reference_pages_show_the_exported_names():
    pytest.importorskip("sphinx")
    from api_reference import find_modules, public_modules

    # The command line has a page of its own.
    assert {module.__name__ for module in find_modules()} - {"regard.cli"} == {
        module.__name__ for module in list_modules()
    }
    shown = {name.name for module in public_modules() for name in module.names}
    values = {id(name.value) for module in public_modules() for name in module.names}
    assert all(id(exported) in values for _, _, exported in list_objects())
    assert {f"regard.{name}" for module, name, _ in list_objects() if module is regard} <= shown


REVEALED = re.compile(r'Revealed type is "(.*)"')
TYPED = [
    *(f"regard.{name}" for name in list_exports(regard)),
    *(
        "regard.survey.run",
        "regard.survey.load",
        "regard.models.load",
        "regard.lens.Recording",
        "regard.masks.causal",
    ),
    *(
        "regard.nn.KVCache",
        "regard.plot.heatmap",
        "regard.testing.check_conformance",
        "regard.engines.register",
    ),
]


@pytest.mark.slow
def test_the_type_checker_knows_every_exported_name(tmp_path):
    api = pytest.importorskip("mypy.api")
    file = tmp_path / "names.py"
    file.write_text("import regard\n" + "".join(f"reveal_type({name})\n" for name in TYPED))
    report, errors, code = api.run([str(file), "--config-file", str(ROOT / "pyproject.toml")])
    assert code == 0, report + errors
    revealed = REVEALED.findall(report)
    assert len(revealed) == len(TYPED)
    unknown = [name for name, kind in zip(TYPED, revealed, strict=True) if kind in ("Any", "builtins.object")]
    assert unknown == []
    assert "Recording" in revealed[TYPED.index("regard.load_recording")]
    assert "LoadedModel" in revealed[TYPED.index("regard.models.load")]


# A user's script: each comment is the type that a strict type checker sees, which is never Any.
SCRIPT = """
import torch
from torch import nn

import regard

query, key, value = torch.randn(3, 1, 8, 64, 32).unbind()
A = regard.attention(query, key, mask=regard.causal() & regard.sliding_window(16))
reveal_type(A)  # AttentionMatrix[Tensor]
reveal_type(A @ value)  # Tensor
reveal_type(A.lse)  # Tensor
reveal_type(A.entropy())  # Tensor
reveal_type(A.mass(regard.masks.first(4)))  # Tensor
reveal_type(A.topk(3).indices)  # Tensor
reveal_type(A.sum(-2))  # Tensor
reveal_type(A.to_dense())  # Tensor
reveal_type(A.lazy[0, 3])  # AttentionMatrix[Tensor]
reveal_type(A.lazy[0, 3].explain(5))  # Explanation
reveal_type(A.lazy[0, 3].page())  # Page

model = nn.TransformerEncoderLayer(32, 4, batch_first=True)
with regard.watch(model) as recording:
    model(torch.randn(1, 64, 32))
reveal_type(recording)  # Recording
reveal_type(recording["self_attn"])  # AttentionMatrix[Tensor]
reveal_type(recording.heads())  # Table
reveal_type(recording.page())  # Page
reveal_type(recording.diagnose())  # Findings
reveal_type(regard.attention([[1.0]], [[1.0]]).entropy())  # ndarray
"""


@pytest.mark.nightly
@pytest.mark.slow
def test_a_strict_type_checker_knows_the_types_of_a_users_script(tmp_path):
    api = pytest.importorskip("mypy.api")
    pytest.importorskip("torch")
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    report, errors, code = api.run([str(file), "--strict", "--config-file", "", "--follow-imports", "silent"])
    assert code == 0, report + errors
    expected = re.findall(r"reveal_type\(.*\)  # (.*)", SCRIPT)
    for revealed, name in zip(REVEALED.findall(report), expected, strict=True):
        assert re.sub(r"\w+\.|\?", "", revealed).startswith(name), (revealed, name)
