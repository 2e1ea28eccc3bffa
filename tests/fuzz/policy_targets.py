"""Cache policies: files whose bytes or values are changed."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

from tests.fuzz.inputs import change_bytes, change_json
from tests.fuzz.runner import RunInput, Target


def build_policies(folder: Path) -> RunInput:
    from regard.policy import CachePolicy

    path = folder / "policy.json"
    CachePolicy([[4, 2], [3, 5]], [[0, 1], [1, 0]], ["a", "b"]).save(path)
    data = path.read_bytes()

    def run(rng: Random) -> None:
        if rng.random() < 0.4:
            path.write_bytes(change_bytes(rng, data))
        else:
            path.write_text(json.dumps(change_json(rng, json.loads(data))))
        policy = CachePolicy.load(path)
        repr(policy)
        policy.save(path)
        CachePolicy.load(path)

    return run


TARGETS = (Target("policies", 60, build_policies),)
