"""One engine in this process: what a request gets, and what it costs the others."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import regard.vllm
from tests.helpers.served_case import draw_prompts
from tests.helpers.served_models import compute_weights, save_model

VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in this process
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
SPANS = {"a": [0, 2]}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    os.environ |= VARIABLES
    from vllm import LLM

    folder = tmp_path_factory.mktemp("served")
    model = save_model("gpt_oss", folder)  # grouped heads, a window and sinks
    llm = LLM(
        model=str(model),
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=4,
        max_num_batched_tokens=128,
        enable_prefix_caching=False,  # rows that are computed again differ in rounding
        seed=0,
        additional_config={"regard": {"folder": str(folder / "records")}},
    )
    core = llm.llm_engine.engine_core.engine_core
    wrapper = core.model_executor.driver_worker
    yield SimpleNamespace(
        llm=llm,
        model=model,
        folder=folder / "records",
        wrapper=wrapper,
        measurements=wrapper.regard_records.__self__,
    )
    core.shutdown()


def generate(engine: Any, given: Any = None, **more: Any) -> list[Any]:
    """Generate answers to eight prompts, and one more so that the worker hears of their end."""
    from vllm import SamplingParams

    def params(extra: dict[str, Any] | None, **more: Any) -> Any:
        return SamplingParams(
            **{"max_tokens": 8, "temperature": 0, "logprobs": 1, "extra_args": extra} | more
        )

    prompts = [{"prompt_token_ids": prompt} for prompt in draw_prompts("batch")]
    extra = None if given is None else {"regard": given}
    outputs = engine.llm.generate(prompts, params(extra, ignore_eos=True, **more), use_tqdm=False)
    for _ in range(2):
        engine.llm.generate([prompts[0]], params({"regard": False}, max_tokens=1), use_tqdm=False)
    return [
        (
            answer.token_ids,
            [sorted((t, p.logprob) for t, p in step.items()) for step in answer.logprobs],
            output,
        )
        for output in outputs
        for answer in output.outputs
    ]


def wait(engine: Any) -> None:
    """Wait until the records are written."""
    while engine.measurements.delivery.counts["file_waiting"]:
        pass


def test_weights_are_those_of_transformers_and_outputs_do_not_change(engine: Any) -> None:
    bare = generate(engine)
    answers = generate(engine, {"spans": SPANS, "keep": True, "topk": 512, "prompt": True})
    assert [answer[:2] for answer in answers] == [answer[:2] for answer in bare]
    wait(engine)
    log = regard.vllm.load(engine.folder)
    for tokens, _, output in answers:
        prompt = list(output.prompt_token_ids)
        (record,) = log[output.request_id]
        assert record.generated_tokens == record.measured_tokens == 8
        dense = compute_weights(engine.model, [*prompt, *tokens])
        for own, weights in zip(record.rows.values(), dense, strict=True):
            rows = own["positions"]
            wanted = weights[:, rows].numpy()
            stored = np.zeros((*own["top_keys"].shape[:2], wanted.shape[-1] + 1))  # −1 is no key
            np.put_along_axis(stored, own["top_keys"].astype(int), own["top_values"], -1)
            assert abs(stored[..., :-1] - wanted).max() <= 1e-5
            assert abs(own["shares"][..., 0] - wanted[..., :2].sum(-1)).max() <= 1e-5
        page = record.page([str(token) for token in [*prompt, *tokens]])
        assert "What the answer" in page.html


def test_steps_without_a_measured_request_call_no_layer_of_ours(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for name in ("_wrap", "_read_queries"):
        monkeypatch.setattr(engine.measurements, name, lambda *_: calls.append("wrapped"))
    generate(engine)
    assert not calls
    assert not any("forward" in vars(layer.implementation) for layer in engine.measurements.layers)


def test_a_rate_of_1_measures_every_request(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = engine.measurements.settings
    monkeypatch.setattr(engine.measurements, "settings", dataclasses.replace(settings, rate=1.0))
    before = dict(engine.measurements.counts)
    generate(engine)
    generate(engine, False)
    counts = engine.measurements.counts
    assert counts["measured"] - before["measured"] == 8
    assert counts["seen"] - before["seen"] == 20  # with those that end the two calls


def test_a_version_of_vllm_with_other_names_starts_without_the_plugin(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import logging

    from vllm.v1.worker.worker_base import WorkerWrapperBase

    from regard.vllm.worker import register

    monkeypatch.delattr(WorkerWrapperBase, "_regard_registered", raising=False)
    monkeypatch.delattr(WorkerWrapperBase, "initialize_from_config")
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    register()
    assert "does not know this version" in caplog.text


def test_children_of_one_request_have_records_of_their_own(engine: Any) -> None:
    answers = generate(engine, {"spans": SPANS}, n=2, temperature=1.0)
    assert len(answers) == 16
    wait(engine)
    log = regard.vllm.load(engine.folder)
    for _, _, output in answers:
        assert [record.child for record in log[output.request_id]] == [0, 1]


@pytest.mark.parametrize("wrong", [{"spans": {"a": [0, 9999]}}, {"span": {}}, "not JSON", 7])
def test_a_wrong_option_fails_the_record_and_not_the_request(engine: Any, wrong: Any) -> None:
    answers = generate(engine, wrong)
    assert [answer[:2] for answer in answers] == [answer[:2] for answer in generate(engine)]
    wait(engine)
    log = regard.vllm.load(engine.folder)
    assert all(output.request_id in log.failures for _, _, output in answers)


@pytest.mark.parametrize("place", ["_measure", "add_rows", "find_new_rows", "finish", "loses_keys"])
def test_an_error_of_ours_fails_no_request(engine: Any, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from regard.vllm.measured_request import MeasuredRequest

    def fail(*_: Any) -> None:
        raise ZeroDivisionError("planted")

    bare, before = generate(engine), dict(engine.measurements.counts)
    with monkeypatch.context() as patch:
        patch.setattr(MeasuredRequest, place, fail)
        answers = generate(engine, {})
    assert [answer[:2] for answer in answers] == [answer[:2] for answer in bare]
    assert engine.measurements.counts["failed"] - before["failed"] == 8
    assert not engine.measurements.requests
    wait(engine)
    log = regard.vllm.load(engine.folder)
    assert all("planted" in log.failures[output.request_id] for _, _, output in answers)
    generate(engine, {})  # and the next ones are measured
    assert engine.measurements.counts["measured"] - before["measured"] == 8
