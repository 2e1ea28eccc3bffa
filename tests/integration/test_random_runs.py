"""Random runs of tiny models: recorded weights and edited outputs equal those of eager attention, under the error rule.

    scripts/test tests/integration/test_random_runs.py --runs 300
    scripts/test 'tests/integration/test_random_runs.py::test_a_run_equals_eager_attention[217]' --runs 300

Each run draws a model family, a decoding mode, padding, a batch size, and what is compared: what `watch` records, what
`intervene` changes, or what `attn_implementation="regard"` returns. `--case-seed` draws others.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from regard.types import ORDINARY_TOLERANCE  # noqa: E402
from tests.helpers.random_runs import FAMILIES, MODES, Run, draw_runs  # noqa: E402
from tests.helpers.run_checks import check_run, decode_with_attentions, run_eagerly  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "run" in metafunc.fixturenames:
        count, seed = metafunc.config.getoption("--runs"), metafunc.config.getoption("--case-seed")
        metafunc.parametrize("run", draw_runs(count, seed), ids=lambda run: str(run.number))


def test_a_run_equals_eager_attention(run: Run) -> None:
    check_run(run)


def test_the_runs_of_ci_cover_families_modes_and_checks() -> None:
    runs = draw_runs(30, seed=1)
    assert {run.family for run in runs} == FAMILIES.keys() and {run.mode for run in runs} == MODES.keys()
    assert {run.check for run in runs} == {"edit", "watch", "implementation"}
    assert runs == draw_runs(300, seed=1)[:30]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_reference_is_eager_attention_of_transformers(family: str) -> None:
    run = Run(0, family, "forward", "none", 2 if not FAMILIES[family].length else 1, "watch", seed=5)
    with torch.no_grad():
        _, reference = run_eagerly(run, run.seed, [], torch.float32)
        _, (attentions,) = decode_with_attentions(run, FAMILIES[family].build("eager"), run.seed)
    assert reference.layers == FAMILIES[family].list_layers()
    layers = reference.calls[0].layers.values()
    assert len(attentions) == len(layers)
    for weights, layer in zip(attentions, layers, strict=True):
        assert float((weights - layer.weights).abs().max()) <= ORDINARY_TOLERANCE["float32"]
