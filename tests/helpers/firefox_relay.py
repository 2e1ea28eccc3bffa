#!/usr/bin/env python3
"""Start Firefox for Playwright, and answer the one command of WebDriver BiDi that Firefox ESR does not have.

Playwright sends `emulation.setMediaFeaturesOverride` for every context. Firefox ESR 153 answers "unknown command", and
Playwright gives the context up. Playwright starts this program as its Firefox. The program starts the real one with
the same arguments and relays the messages of both. It answers the command itself if that sets nothing, or the light
colour scheme, which Firefox is started with. Every other message is passed on as it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import sys
from functools import partial

COMMAND = "emulation.setMediaFeaturesOverride"
LISTENING = re.compile(rb"(WebDriver BiDi listening on ws://[\d.]+:)(\d+)")
TEXT = 0x81  # first byte of a text message that is whole, without extensions


async def read_frame(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Read a WebSocket frame (RFC 6455, section 5.2) and return it as it came, and its payload without the mask."""
    raw = await reader.readexactly(2)
    is_masked, length = raw[1] >> 7, raw[1] & 127
    if length > 125:
        raw += await reader.readexactly(2 if length == 126 else 8)
        length = int.from_bytes(raw[2:], "big")
    key = await reader.readexactly(4 * is_masked)
    payload = await reader.readexactly(length)
    raw += key + payload
    if is_masked:
        pad = (key * (length // 4 + 1))[:length]
        number = int.from_bytes(payload, "big") ^ int.from_bytes(pad, "big")
        payload = number.to_bytes(length, "big")
    return raw, payload


def answer_command(payload: bytes) -> bytes | None:
    """Return the frame that answers a message, or None if Firefox is to answer it."""
    if COMMAND.encode() not in payload:
        return None
    message = json.loads(payload)
    scheme = message.get("params", {}).get("features", {}).get("prefers-color-scheme")
    if message.get("method") != COMMAND or scheme not in (None, "light"):
        return None
    text = json.dumps({"type": "success", "id": message["id"], "result": {}}).encode()
    assert len(text) < 126, "the length would need more bytes"
    return bytes([TEXT, len(text)]) + text


async def relay(port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Connect a client with Firefox until either closes."""
    firefox_reader, firefox_writer = await asyncio.open_connection("127.0.0.1", port)
    request = await reader.readuntil(b"\r\n\r\n")
    firefox_writer.write(re.sub(rb"(?im)^(host: [\d.]+:)\d+", rb"\g<1>%d" % port, request))
    writer.write(await firefox_reader.readuntil(b"\r\n\r\n"))

    async def send() -> None:
        while True:
            raw, payload = await read_frame(reader)
            if raw[0] == TEXT and (answer := answer_command(payload)):
                writer.write(answer)
                await writer.drain()
            else:
                firefox_writer.write(raw)
                await firefox_writer.drain()

    async def receive() -> None:
        while True:
            writer.write((await read_frame(firefox_reader))[0])
            await writer.drain()

    tasks = [asyncio.create_task(send()), asyncio.create_task(receive())]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        await asyncio.gather(*(task for task in tasks if task.done()))
    writer.close()
    firefox_writer.close()


async def main() -> int:
    firefox = shutil.which("firefox-esr") or shutil.which("firefox")
    assert firefox, "no Firefox on PATH"
    process = await asyncio.create_subprocess_exec(firefox, *sys.argv[1:], stderr=asyncio.subprocess.PIPE)
    assert process.stderr is not None
    async for line in process.stderr:
        if found := LISTENING.search(line):
            server = await asyncio.start_server(partial(relay, int(found[2])), "127.0.0.1", 0)
            line = LISTENING.sub(rb"\g<1>%d" % server.sockets[0].getsockname()[1], line)
        sys.stderr.buffer.write(line)
        sys.stderr.buffer.flush()
    return await process.wait()


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
