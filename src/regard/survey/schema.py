"""The rows of a survey: Parquet files with one row for each (document, layer, head).

Schema version 1. The size of a row does not depend on the length of its document:

| column | type | meaning |
| --- | --- | --- |
| `document` | string | position of the document in the corpus: `guide/intro.txt`, `pages.jsonl@18034` |
| `name` | string or null | the document's own name, if the corpus has a name field |
| `tokens` | int32 | number of tokens measured |
| `truncated` | bool | whether the document has more tokens than were measured |
| `layer` | int16 | index of the attention layer, in the order the layers ran |
| `head`, `kv_head` | int16 | head of that layer, and the key/value head that it reads |
| `module` | string | name of the layer in the model |
| `entropy` | float32 | mean entropy of a row of weights, in nats |
| `entropy_histogram` | 17 × float32 | share of the rows whose entropy is 0–1, 1–2, … 15–16, more than 16 bits |
| `distance` | float32 | mean distance between a token and the keys it attends to, by weight |
| `previous` | float32 | mean weight on the previous token |
| `distance_histogram` | 18 × float32 | weight at distance 0, 1, 2–3, 4–7, … 32,768–65,535, and beyond |
| `within_64` … `within_65536` | float32 | weight inside a window of that many keys, including the token itself |
| `kept_64` … `kept_65536` | float32 | weight inside that window or on the first key |
| `evicted_1`, `evicted_4` | 17 × float32 | weight outside windows of 1, 2, … 65,536 keys and the first 1 or 4 keys |
| `first` | float32 | mean weight on the first token |
| `heavy` | float32 | share of all weight that goes to the tenth of the keys that receives most |
| `duplicate`, `induction` | float32 | for repeated tokens: weight on the earlier copies, and on the tokens after them |
| `lookback` | float32 | if texts answer a prompt: mean lookback ratio of the rows that predict the text's tokens |

Means are taken over the document's tokens. A value is null if it is undefined: distances if queries and keys belong to
two sequences, copies if no token is repeated, the lookback ratio if a text has no prompt or fewer than two tokens. A
survey without prompts has no column `lookback`. A shard is one file. The JSON under `regard.survey` in its footer holds
the schema version, the number of the shard and its quarantined documents.
"""

from __future__ import annotations

from collections.abc import Collection

from regard.jobs.shards import EVICTION_WINDOWS

# Windows of this many keys, including the row's own; a layer without a causal mask has one on either side.
WINDOWS = tuple(2**power for power in range(6, 17))
# Numbers of first keys that a cache policy may keep; without first keys, the histogram has the weight.
SINKS = (1, 4)
# Distances 0, 1, 2–3, 4–7, … 32,768–65,535, and beyond: a window of 2^k keys is the first k + 1 of these bins.
DISTANCE_BINS = 18
# The entropy of a row in bits: below 1, below 2, … below 16, and above.
ENTROPY_BINS = 17
MEASURES = ("entropy", "distance", "first", "heavy", "copies")
# Measures of texts that answer a prompt, beside the others.
PROMPT_MEASURES = ("lookback",)


def list_columns(measures: Collection[str] = MEASURES) -> dict[str, int]:
    """List the measured columns in order, each with its width: 1, or the number of bins of a histogram."""
    widths = {
        "entropy": {"entropy": 1, "entropy_histogram": ENTROPY_BINS},
        "distance": {
            "distance": 1,
            "previous": 1,
            "distance_histogram": DISTANCE_BINS,
            **{f"within_{window}": 1 for window in WINDOWS},
            **{f"kept_{window}": 1 for window in WINDOWS},
            **{f"evicted_{sinks}": len(EVICTION_WINDOWS) for sinks in SINKS},
        },
        "first": {"first": 1},
        "heavy": {"heavy": 1},
        "copies": {"duplicate": 1, "induction": 1},
        "lookback": {"lookback": 1},
    }
    return {
        name: width for measure, own in widths.items() if measure in measures for name, width in own.items()
    }
