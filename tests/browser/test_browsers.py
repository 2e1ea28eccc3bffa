"""The browsers that pages are opened in: the relay to Firefox, and what the fixture `show` relies on."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.helpers.firefox_relay import COMMAND, TEXT, answer_command, read_frame
from tests.helpers.pages import wait_until


def encode_frame(payload: bytes, key: bytes = b"") -> bytes:
    """Return a text frame of a WebSocket, masked with a key of four bytes if there is one."""
    size = len(payload)
    width = 0 if size < 126 else 2 if size < 1 << 16 else 8
    length = bytes([127 if width == 8 else 126]) + size.to_bytes(width, "big") if width else bytes([size])
    if key:
        length = bytes([length[0] | 128]) + length[1:] + key
        payload = bytes(byte ^ key[i % 4] for i, byte in enumerate(payload))
    return bytes([TEXT]) + length + payload


@pytest.mark.parametrize("size", [0, 5, 125, 126, 65_535, 65_536])
@pytest.mark.parametrize("key", [b"", b"\x01\x80\xff\x37"])
def test_frames_are_read_as_they_came(size, key):
    payload = bytes(i % 251 for i in range(size))
    frame = encode_frame(payload, key)

    async def read():
        reader = asyncio.StreamReader()
        reader.feed_data(frame + b"next")
        return await read_frame(reader), await reader.readexactly(4)

    assert asyncio.run(read()) == ((frame, payload), b"next")


def ask(method: str = COMMAND, **params: object) -> bytes:
    return json.dumps({"id": 12_345_678_901, "method": method, "params": params}).encode()


def test_only_what_changes_nothing_is_answered():
    for features in ({}, {"prefers-color-scheme": "light"}, {"prefers-color-scheme": None}):
        answer = answer_command(ask(features=features))
        assert answer[0] == TEXT and answer[1] == len(answer) - 2
        assert json.loads(answer[2:]) == {"type": "success", "id": 12_345_678_901, "result": {}}
    assert answer_command(ask(features={"prefers-color-scheme": "dark"})) is None
    assert answer_command(ask("script.evaluate", expression=f"'{COMMAND}'")) is None
    assert answer_command(b"{}") is None


@pytest.mark.nightly
def test_messages_errors_and_requests_of_a_page_are_noticed(browser):
    events = set()
    context = browser.new_context()
    tab = context.new_page()
    tab.on("console", lambda message: events.add(f"console {message.text}"))
    tab.on("pageerror", lambda error: events.add(f"error {error.message}"))
    tab.on("request", lambda request: events.add(f"request {request.url}"))
    script = (
        "console.log('hello'); new Image().src = 'http://127.0.0.1:65000/x.png'; throw new Error('wrong')"
    )
    tab.set_content(f"<script>{script}</script>")
    expected = {"console hello", "error wrong", "request http://127.0.0.1:65000/x.png"}
    wait_until(tab, lambda: expected <= events)
    context.close()
