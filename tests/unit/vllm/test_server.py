"""Spans of a prompt, found with a server's `/tokenize` and `/detokenize` alone."""

from __future__ import annotations

from typing import Any

import pytest

import regard
from regard.vllm import find_spans, server


def serve(monkeypatch: pytest.MonkeyPatch, text: str, decode: Any, tokens: int) -> list[dict[str, Any]]:
    """Answer for a server whose prompt is a text of some tokens; returns the bodies of the requests."""
    bodies = []

    def post(url: str, body: dict[str, Any], headers: Any) -> Any:
        bodies.append(body)
        if url.endswith("/tokenize"):
            return {"tokens": list(range(tokens))}
        assert url == "http://server/detokenize" and body["tokens"] == list(range(len(body["tokens"])))
        return {"prompt": decode(len(body["tokens"]))}

    monkeypatch.setattr(server, "_post", post)
    return bodies


def decode_bytes(text: str, run: bool) -> Any:
    """Decode the first bytes of a text, a token each; an incomplete run of bytes is all replacement characters."""
    data = text.encode()

    def decode(count: int) -> str:
        if not run:
            return data[:count].decode(errors="replace")
        start = count
        while start and data[start - 1] >= 128:  # a run of bytes that are not ASCII
            start -= 1
        try:
            return data[:count].decode()
        except UnicodeDecodeError:
            return data[:start].decode() + "\ufffd" * (count - start)

    return decode


@pytest.mark.parametrize("run", [False, True], ids=["bytes", "byte fallback"])
@pytest.mark.parametrize("text", ["日本語中国語", "a😀b😀c, დილა მშვიდობისა!", "plain text", "éàüöñ"])
def test_edges_between_characters_of_several_tokens_are_exact(
    text: str, run: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(monkeypatch, text, decode_bytes(text, run), len(text.encode()))
    for edge in range(1, len(text)):
        first, second = text[:edge], text[edge:]
        parts = {
            name: part
            for name, part in (("a", first), ("b", second))
            if text.find(part) == text.rfind(part)  # once
        }
        found = find_spans(text, parts, url="http://server/", model="m")
        middle = len(first.encode())
        wanted = {"a": [0, middle], "b": [middle, len(text.encode())]}
        assert found == {name: wanted[name] for name in parts}


def test_tokens_that_cross_an_edge_belong_to_the_nearer_side(monkeypatch: pytest.MonkeyPatch) -> None:
    text, ends = "one two three", [0, 3, 9, 13]  # "one", " two t", "hree"
    serve(monkeypatch, text, lambda count: text[: ends[count]], 3)
    assert find_spans(text, {"a": "one two", "b": " three"}, url="http://server", model="m") == {
        "a": [0, 2],
        "b": [2, 3],
    }
    with pytest.raises(regard.ArgumentError, match="no token"):
        find_spans(text, {"a": "e t"}, url="http://server", model="m")


def test_options_of_the_template_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = serve(monkeypatch, "ab", lambda count: "ab"[:count], 2)
    messages, options = [{"role": "user", "content": "ab"}], {"tools": [1], "chat_template_kwargs": {"x": 1}}
    find_spans(messages, {"a": "b"}, url="http://server", model="m", options=options)
    assert bodies[0] == {"model": "m", "messages": messages, **options}
