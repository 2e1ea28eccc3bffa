"""Every weight of a live request, against the eager weights of transformers on the same tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import regard.vllm
from tests.helpers.served_case import CASES
from tests.helpers.served_models import CONFIGS, compute_weights, save_model

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def run_case(
    model: Path, case: str, out: Path, settings: dict[str, Any] | None, **variables: str
) -> list[dict[str, Any]]:
    environ = {
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0|1" if case == "tensor-parallel" else "0-1",
        **os.environ,
        **variables,
    }  # fmt: skip
    # The processes of an engine each take half a minute to import vLLM, so most cases have one process. In "many" and
    # "abort", batches must not depend on when requests arrive, either.
    if case != "tensor-parallel" and (model.name, case) not in SEPARATE_PROCESSES:
        environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    command = [
        sys.executable,
        "-m",
        "tests.helpers.served_case",
        str(model),
        case,
        str(out),
        json.dumps(settings),
    ]
    ran = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=1800)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    (out / "log.txt").write_text(ran.stdout + ran.stderr)
    return json.loads((out / "outputs.json").read_text())


def check_answers(answers: list[dict[str, Any]], out: Path, model: Path, case: str) -> float:
    """Compare every number of every record with those of the dense weights; return the largest difference.

    float32 must agree to 1e-5. In bfloat16 the model's own rounding differs from that of transformers, so the error
    rule holds: at most twice the error of transformers at bfloat16, both against float64.
    """
    log = regard.vllm.load(out / "records")
    assert not log.failures and log.counts["open"] == 0
    worst, naive = 0.0, 0.0
    for answer in answers:
        (record,) = [own for own in log[answer["id"]] if own.child == answer["child"]]
        prompt, tokens = len(answer["prompt"]), len(answer["tokens"])
        sequence = answer["prompt"] + answer["tokens"]
        dense = compute_weights(model, sequence, "exact" if case == "bfloat16" else "float32")
        if case == "bfloat16":
            eager = compute_weights(model, sequence, "bfloat16")
            naive = max(naive, *(float((a - b).abs().max()) for a, b in zip(eager, dense, strict=True)))
        assert record.prompt_tokens == prompt
        if case != "stop-text":  # the engine goes on until the text is found to have ended
            assert record.generated_tokens == tokens
        assert record.measured_tokens == record.generated_tokens
        assert len(record.rows) == len(dense)
        for own, weights in zip(record.rows.values(), dense, strict=True):
            rows = own["positions"]
            generated = rows[rows >= prompt - 1]
            np.testing.assert_array_equal(
                generated, np.arange(prompt - 1, prompt - 1 + record.generated_tokens)
            )
            if case in ("prompt", "prefix-reread"):
                np.testing.assert_array_equal(rows[rows < prompt - 1], np.arange(prompt - 1))
            inside = rows < prompt + tokens
            worst = max(worst, _compare(own, rows, inside, weights.numpy(), prompt))
    if case in ("preempt", "preempt-groups"):
        assert sum(record.preemptions for own in log.values() for record in own) > 0
    limit = 1e-5 if case != "bfloat16" else 2 * naive
    assert worst <= limit, (worst, limit)
    return worst


def _compare(own: dict[str, Any], rows: Any, inside: Any, weights: Any, prompt: int) -> float:
    """Return the largest difference of a layer's weights, shares, and entropies in parts of the largest one."""
    weights = weights[:, rows[inside]]
    assert len(own["shares"]) == len(weights)  # heads
    stored = np.zeros_like(weights)
    keys, values = own["top_keys"][:, inside], own["top_values"][:, inside]
    for head, row in np.ndindex(stored.shape[:2]):
        known = keys[head, row] >= 0
        stored[head, row, keys[head, row][known]] = values[head, row][known]
    shares = np.stack(
        [weights[..., :2].sum(-1), weights[..., 2:prompt].sum(-1), weights[..., prompt:].sum(-1)], -1
    )
    differences = [
        abs(stored - weights).max(),
        abs(own["first"][:, inside] - weights[..., 0]).max(),
        abs(own["shares"][:, inside] - shares).max(),
    ]
    if abs(weights.sum(-1) - 1).max() < 1e-4:  # with a sink, the entropy counts its share
        logs = np.log(np.where(weights > 0, weights, 1.0))
        entropy = -(weights * logs).sum(-1)
        differences.append(abs(own["entropy"][:, inside] - entropy).max() / max(entropy.max(), 1.0))
    return float(max(differences))


PAIRS = [
    *((name, "batch") for name in CONFIGS),
    *(("llama", case) for case in CASES if case not in ("batch", "windows", "many", "preempt-groups")),
    *(("gemma3", case) for case in ("windows", "preempt-groups", "chunked")),
    ("mistral", "windows"),
    ("gpt_oss", "windows"),
    ("gpt_oss", "tensor-parallel"),
    ("bloom", "tensor-parallel"),
    ("gpt_oss", "bfloat16"),
]

# Scheduler and worker have processes of their own here, as in a server. In "tensor-parallel" they always have.
SEPARATE_PROCESSES = (("llama", "batch"), ("llama", "prefix"), ("llama", "preempt"))


@pytest.mark.nightly
@pytest.mark.parametrize("name,case", PAIRS)
def test_every_weight_is_that_of_transformers(
    name: str, case: str, models: Path, tmp_path: Path, record_property: Any
) -> None:
    model = save_model(name, models)
    answers = run_case(model, case, tmp_path, {})
    assert len(answers) >= 4
    worst = check_answers(answers, tmp_path, model, case)
    record_property("largest difference", worst)
    print(f"\n{name} {case}: {len(answers)} answers, largest difference {worst:.1e}")


@pytest.mark.nightly
def test_tokens_and_logprobs_are_bit_identical_at_every_rate(models: Path, tmp_path: Path) -> None:
    model = save_model("llama", models)
    bare = run_case(model, "many", tmp_path / "bare", None, VLLM_PLUGINS="")
    assert len(bare) == 200 and all(answer["logprobs"] for answer in bare)
    measured = {}
    for name, settings in {"off": None, "0": {"rate": 0}, "0.01": {"rate": 0.01}, "1": {"rate": 1}}.items():
        answers = run_case(model, "many", tmp_path / name, settings)
        for own, other in zip(answers, bare, strict=True):
            assert own["tokens"] == other["tokens"] and own["logprobs"] == other["logprobs"]
        if settings is not None and settings["rate"]:
            measured[name] = regard.vllm.load(tmp_path / name / "records").counts["record"]
    assert measured["1"] == 200 and 0 < measured["0.01"] < 20, measured
