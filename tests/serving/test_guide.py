"""The example of the guide, run against a server: its records are those that the guide shows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import regard.vllm
from examples.serving import RECORDS
from examples.serving.ask import ask
from examples.serving.save_model import save_model
from tests.helpers.served_openai import Server


@pytest.mark.nightly
def test_the_stored_records_are_what_a_server_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(str(tmp_path / "stories-model"))
    server = Server(tmp_path / "stories-model", tmp_path, {"token_ids": True}, served_name="stories")
    with server:
        response = ask(server.url, "stories")
    assert capsys.readouterr().out.startswith(" Tom.")
    (record,) = regard.vllm.load(server.records)[response]
    (stored,) = next(iter(regard.vllm.load(RECORDS).values()))
    assert record.token_ids == stored.token_ids and record.spans == stored.spans
    for own, other in zip(record.rows.values(), stored.rows.values(), strict=True):
        np.testing.assert_allclose(own["shares"], other["shares"], atol=1e-5)
