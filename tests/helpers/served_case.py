"""Run one case in an engine of vLLM, in a process of its own.

    python -m tests.helpers.served_case MODEL CASE OUT SETTINGS

It writes what the engine returned to OUT/outputs.json: for each answer the id, the child, the tokens of prompt and
answer, their logprobs, and why it ended. The plugin writes its records to OUT/records.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

CASES = (
    "batch", "prompt", "prefix", "prefix-reread", "chunked", "preempt", "preempt-groups", "windows", "sampling", "stop",
    "stop-text",
    "abort", "async", "many", "bfloat16", "compile", "tensor-parallel",
)  # fmt: skip


def draw_prompts(case: str) -> list[list[int]]:
    """Draw the prompts of a case."""
    generator = torch.Generator().manual_seed(0)

    def draw(length: int) -> list[int]:
        return torch.randint(5, 900, (length,), generator=generator).tolist()

    if case.startswith("prefix"):
        shared = draw(260)
        return [shared + draw(length) for length in (1, 20, 90)] + [shared]
    if case == "many":
        return [draw(1 + 37 * i % 150) for i in range(200)]
    if case in ("preempt", "preempt-groups", "windows"):
        return [draw(120 + 7 * i) for i in range(6)]
    return [draw(length) for length in (3, 17, 55, 127, 128, 129, 200, 301)]


def run_case(model: str, case: str, out: Path, regard: dict[str, Any] | None) -> None:
    """Run a case and write its outputs; `regard` is the plugin's setting, None for none."""
    from vllm import LLM, SamplingParams

    options: dict[str, Any] = {
        "model": model,
        "dtype": "bfloat16" if case == "bfloat16" else "float32",
        "enforce_eager": case != "compile",
        "max_model_len": 512,
        "max_num_seqs": 8,
        "enable_prefix_caching": case.startswith("prefix"),
        "disable_log_stats": True,
    }
    if regard is not None:
        options["additional_config"] = {"regard": regard | {"folder": str(out / "records")}}
    if case == "chunked":
        options |= {"max_num_batched_tokens": 64, "enable_chunked_prefill": True}
    if case in ("preempt", "preempt-groups", "windows"):
        options |= {
            "num_gpu_blocks_override": {"preempt": 8, "preempt-groups": 12}.get(case, 18),
            "max_num_seqs": 8,
        }
    if case == "async":
        options["async_scheduling"] = True
    if case == "tensor-parallel":
        options["tensor_parallel_size"] = 2
    llm = LLM(**options)
    prompts = [{"prompt_token_ids": prompt} for prompt in draw_prompts(case)]
    outputs = _generate(llm, case, prompts, SamplingParams)
    # Two more steps, so that the worker hears which requests have ended.
    for _ in range(2):
        llm.generate(
            [{"prompt_token_ids": [1, 2]}],
            SamplingParams(max_tokens=1, extra_args={"regard": False}),
            use_tqdm=False,
        )
    answers = [
        {
            "id": output.request_id,
            "child": answer.index,
            "prompt": list(output.prompt_token_ids),
            "tokens": list(answer.token_ids),
            "logprobs": [
                sorted((token, part.logprob) for token, part in step.items()) for step in answer.logprobs
            ]
            if answer.logprobs
            else [],
            "reason": answer.finish_reason,
        }
        for output in outputs
        for answer in output.outputs
    ]
    out.mkdir(parents=True, exist_ok=True)
    (out / "outputs.json").write_text(json.dumps(answers))
    llm.llm_engine.engine_core.shutdown()


def _generate(llm: Any, case: str, prompts: list[Any], sampling_params: Any) -> list[Any]:
    wants = {
        "spans": {"a": [0, 2]},
        "keep": True,
        "topk": 512,
        "prompt": case in ("prompt", "prefix", "prefix-reread"),
    }

    def params(**more: Any) -> Any:
        base = {
            "max_tokens": 12, "temperature": 0, "ignore_eos": True, "logprobs": 1, "extra_args": {"regard": wants},
        }  # fmt: skip
        return sampling_params(**base | more)

    if case.startswith("prefix"):
        skip = {"skip_reading_prefix_cache": True} if case == "prefix-reread" else {}
        return [llm.generate([prompt], params(**skip), use_tqdm=False)[0] for prompt in prompts]
    if case == "abort":
        engine = llm.llm_engine
        for number, prompt in enumerate(prompts):
            engine.add_request(f"request{number}", prompt, params(max_tokens=100))
        for _ in range(6):
            engine.step()
        engine.abort_request([f"request{number}" for number in range(4)])
        finished = []
        while engine.has_unfinished_requests():
            finished += [output for output in engine.step() if output.finished]
        return finished
    if case in ("stop", "stop-text", "async"):
        first = llm.generate(prompts, params(max_tokens=30, extra_args=None), use_tqdm=False)
        sixth = [output.outputs[0].token_ids[5] for output in first]
        stops = [
            params(
                max_tokens=30,
                **({"stop_token_ids": [token]} if case != "stop-text" else {"stop": [f"w{token}"]}),
            )
            for token in sixth
        ]
        return llm.generate(prompts, stops, use_tqdm=False)
    more: dict[str, Any] = {"extra_args": None} if case == "many" else {}
    if case == "sampling":
        more = {"n": 2, "temperature": 1.0, "seed": 7}
    if case in ("preempt", "preempt-groups", "windows"):
        more = {"max_tokens": 300 if case == "windows" else 60}
    return llm.generate(prompts, params(**more), use_tqdm=False)


if __name__ == "__main__":
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    run_case(sys.argv[1], sys.argv[2], Path(sys.argv[3]), json.loads(sys.argv[4]))
