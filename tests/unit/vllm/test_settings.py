"""The settings of a server and the options of a request: what is accepted, and what the errors say."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

import regard
from regard.vllm.settings import (
    RequestOptions,
    Settings,
    asks_for_nothing,
    find_settings,
    is_sampled,
    split_request_id,
)


def config(given: Any) -> Any:
    return SimpleNamespace(additional_config=given)


def test_an_engine_without_settings_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REGARD_VLLM", raising=False)
    for given in ({}, {"other": 1}, {"regard": False}, {"regard": None}, object()):
        assert find_settings(config(given)) is None


def test_settings_come_from_the_config_or_else_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGARD_VLLM", '{"rate": 0.25}')
    assert find_settings(config({})) == Settings(rate=0.25)
    assert find_settings(config({"regard": {"rate": 0.5, "keep": True}})) == Settings(rate=0.5, keep=True)
    assert find_settings(config({"regard": True})) == Settings()


@pytest.mark.parametrize(
    "given",
    [
        {"rate": 2}, {"rate": -0.1}, {"rate": "1"}, {"rate": True}, {"rate": float("nan")}, {"folder": 3},
        {"format": "csv"}, {"topk": -1}, {"topk": 1.5}, {"topk": 1025}, {"keep": 1}, {"queue": 0},
        {"otlp_endpoint": 4317}, {"rates": 0.1}, [1], "rate",
    ],
)  # fmt: skip
def test_wrong_settings_are_refused(given: Any) -> None:
    with pytest.raises((regard.ArgumentError, regard.ArgumentTypeError)) as caught:
        find_settings(config({"regard": given}))
    assert caught.value.operation == "regard.vllm" and caught.value.hint


def test_an_environment_that_is_not_json_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGARD_VLLM", "rate=0.1")
    with pytest.raises(regard.ArgumentError, match="not JSON"):
        find_settings(config({}))


@pytest.mark.parametrize(
    "ranges,labels",
    [
        ([1, 3], [1, 0, 0, 1, 1, 1]),
        ([[0, 1], [4, 6]], [0, 1, 1, 1, 0, 0]),
        ([4, None], [1, 1, 1, 1, 0, 0]),
        ((1, 3), [1, 0, 0, 1, 1, 1]),
    ],
)
def test_spans_of_json_are_ranges_or_lists_of_them(ranges: Any, labels: list[int]) -> None:
    given = {"spans": {"a": ranges}}
    for form in (given, json.dumps(given)):
        spans = RequestOptions.parse(form, Settings()).spans
        assert spans is not None and spans.label_keys(1, 6, "the prompt", "test")[0].tolist() == labels


def test_options_default_to_the_settings() -> None:
    settings = Settings(prompt=True, keep=True, topk=9)
    for given in (None, True, 1, {}, "{}", "true"):
        assert RequestOptions.parse(given, settings) == RequestOptions(None, True, True, 9)
    assert RequestOptions.parse({"keep": False, "topk": 0}, settings) == RequestOptions(None, True, False, 0)


@pytest.mark.parametrize(
    "given",
    [
        {"spans": {"other": [0, 1]}}, {"spans": {"first": [0, 1]}}, {"spans": {"\ud800": [0, 1]}}, "[" * 100_000,
        {"spans": {}}, {"spans": {"a": [0, 2], "b": [1, 3]}}, {"spans": {"a": [2, 2]}},
        {"spans": [0, 1]}, {"spans": {"a": [0, 1.5]}}, {"folder": "/"}, {"keep": "yes"}, {"topk": "4"}, "{", "[]", "3",
        3,
    ],
)  # fmt: skip
def test_wrong_options_are_refused(given: Any) -> None:
    with pytest.raises(regard.RegardError):
        RequestOptions.parse(given, Settings())


def test_a_request_can_refuse_to_be_measured() -> None:
    assert [asks_for_nothing(given) for given in (False, 0, "false", "False ")] == [True] * 4
    assert not any(asks_for_nothing(given) for given in (None, True, 1, {}, "{}"))


def test_ids_of_children_and_suffixes_are_split() -> None:
    assert split_request_id("chatcmpl-12ab-0a1b2c3d") == ("chatcmpl-12ab", 0)
    assert split_request_id("12_cmpl-7-1-0a1b2c3d") == ("cmpl-7-1", 12)
    assert split_request_id("3-0a1b2c3d") == ("3", 0)
    assert split_request_id("plain") == ("plain", 0)


def test_a_rate_measures_its_share_and_children_together() -> None:
    names = [f"chatcmpl-{number}-{number:08x}" for number in range(20_000)]
    share = sum(is_sampled(name, 0.1) for name in names) / len(names)
    assert abs(share - 0.1) < 0.01
    assert all(is_sampled(name, 0.1) == is_sampled(f"1_{name}", 0.1) for name in names[:500])
    assert all(is_sampled(name, 1.0) and not is_sampled(name, 0.0) for name in names[:100])
    offline = [f"{number % 10}-{(number * 2654435761) % 2**32:08x}" for number in range(20_000)]
    assert abs(sum(is_sampled(name, 0.1) for name in offline) / len(offline) - 0.1) < 0.01
