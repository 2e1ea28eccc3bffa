"""Families of transformers whose outputs with a policy cache were compared with those of the policy as masks."""

from __future__ import annotations

# By `config.model_type`; tests/unit/policy/test_cache_families.py compares them.
# fmt: off
TESTED_FAMILIES = frozenset({
    "afmoe", "apertus", "arcee", "bart", "beam", "bert", "bert-generation", "biogpt", "bitnet", "blenderbot",
    "blenderbot-small", "camembert", "cohere", "cohere2", "cohere2_moe", "ctrl", "cwm", "data2vec-text",
    "electra", "ernie", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe", "flex_olmo", "flint", "fuyu",
    "gemma", "gemma2", "gemma3", "gemma3_text", "glm", "glm4", "glm4_moe", "got_ocr2", "gpt2", "gpt_neox",
    "gpt_oss", "granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared", "helium",
    "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hyperclovax", "jais2", "kolibri1", "lfm2", "llama",
    "llama4_text", "marian", "mbart", "mellum", "minimax_m2", "minimax_m3_vl_text", "ministral", "ministral3",
    "mistral", "mixtral", "modernbert-decoder", "moshi", "moss_transcribe_diarize", "nanochat", "nemotron_h",
    "olmo", "olmo2", "olmo3", "olmo_hybrid", "olmoe", "opt", "pegasus", "persimmon", "phi", "phi3",
    "phi4_multimodal", "phimoe", "plbart", "qwen2", "qwen2_moe", "qwen3", "qwen3_5_moe_text", "qwen3_5_text",
    "qwen3_moe", "qwen3_next", "roberta", "roberta-prelayernorm", "roc_bert", "seed_oss", "smollm3", "solar_open",
    "stablelm", "starcoder2", "vaultgemma", "xlm-roberta", "xlm-roberta-xl",
})
# fmt: on
