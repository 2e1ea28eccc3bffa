"""The server's side: the route `GET /regard/<id>`, and spans of a prompt as the server tokenises it."""

from __future__ import annotations

import bisect
import functools
import json
import os
import secrets
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from regard.errors import ArgumentError

__all__ = ["RecordsEndpoint", "find_spans"]


class RecordsEndpoint:
    """Routes that return the records of the last requests; vLLM loads them if `VLLM_PLUGINS` names `regard`.

    `GET /regard` returns what each worker counted, and `GET /regard/<id>` the records of a response: a list for each
    worker, with one record for each child of n > 1.
    """

    name: ClassVar[str] = "regard"
    required_tasks: ClassVar[None] = None

    def __init__(self) -> None:
        self._client: Any = None
        self._keys: list[str] = []

    def attach_router(self, app: Any) -> None:
        """Add the routes to the server's application."""
        app.add_route("/regard", self._get_status, methods=["GET"])
        app.add_route("/regard/{response_id:path}", self._get_records, methods=["GET"])

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Keep the client of the engine, and the keys that vLLM asks for on its own routes."""
        self._client = engine_client
        keys = getattr(args, "api_key", None) or os.environ.get("VLLM_API_KEY")
        self._keys = [keys] if isinstance(keys, str) else list(keys or [])

    async def _call(self, request: Any, name: str, *args: Any) -> list[Any]:
        """Call a function of every worker; an error of the server if nothing is measured."""
        from fastapi import HTTPException

        given = request.headers.get("authorization", "").encode()
        if self._keys and not any(
            secrets.compare_digest(given, f"Bearer {key}".encode()) for key in self._keys
        ):
            raise HTTPException(401, "This route needs the API key of the server.")
        if self._client is None:
            raise HTTPException(503, "This server has no engine.")
        try:
            found: list[str] = await self._client.collective_rpc(name, args=args)
        except Exception as error:
            raise HTTPException(
                503, "regard measures nothing: start the server with --additional-config '{\"regard\": {}}'."
            ) from error
        return [json.loads(text) for text in found]

    async def _get_status(self, request: Any) -> Any:
        from fastapi.responses import JSONResponse

        return JSONResponse(await self._call(request, "regard_status"))

    async def _get_records(self, request: Any) -> Any:
        from fastapi import HTTPException
        from fastapi.responses import JSONResponse

        response_id = request.path_params["response_id"]
        workers = await self._call(request, "regard_records", response_id)
        if not any(workers):
            raise HTTPException(
                404,
                f"No record of {response_id}. It was not measured, has not finished, or is too old; the setting "
                "'recent' is the number of records that are kept.",
            )
        return JSONResponse(workers)


def find_spans(
    prompt: str | Sequence[Mapping[str, Any]],
    spans: Mapping[str, str],
    *,
    url: str,
    model: str,
    options: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
) -> dict[str, list[int]]:
    """Find parts of a prompt as ranges of tokens, with the server's own tokenizer and chat template.

    Args:
        prompt: The prompt of a completion, or the messages of a chat.
        spans: A text for each name; each must occur once in the prompt.
        url: Address of the server without a path, such as "http://localhost:8000".
        model: Name of the model in the server.
        options: Other fields of the request that the chat template reads, such as `tools` and `chat_template_kwargs`.
        headers: Headers of the request, such as an authorization.

    Returns:
        First token and the token after the last, by name: the option `spans` of a request.

    Raises:
        ArgumentError: If a text does not occur once.
    """
    url = url.rstrip("/")
    body = {"prompt": prompt} if isinstance(prompt, str) else {"messages": list(prompt)}
    ids = _post(f"{url}/tokenize", {"model": model, **body, **(options or {})}, headers)["tokens"]

    @functools.cache
    def read_text(tokens: int) -> str:
        text: str = _post(f"{url}/detokenize", {"model": model, "tokens": ids[:tokens]}, headers)["prompt"]
        return text

    @functools.cache
    def count_characters(tokens: int) -> int:
        """Count the whole characters of the first tokens: a character may have up to four tokens."""
        return max(
            (len(read_text(n).rstrip("\ufffd")) for n in range(max(tokens - 3, 1), tokens + 1)), default=0
        )

    text = read_text(len(ids))
    found = {}
    for name, part in spans.items():
        start = text.find(part) if part else -1
        if start < 0 or text.find(part, start + 1) >= 0:
            count = "not" if start < 0 else "several times"
            raise ArgumentError(
                "find_spans",
                received=f"span {name!r}, a text that occurs {count} in the prompt",
                expected="a text that occurs once",
                hint="Pass the text as the chat template writes it, and extend it until it occurs once.",
            )
        found[name] = [
            _find_token(start, len(ids), count_characters),
            _find_token(start + len(part), len(ids), count_characters),
        ]
        if found[name][0] == found[name][1]:
            raise ArgumentError(
                "find_spans",
                received=f"span {name!r}, which contains no token",
                expected="a text of at least one token",
                hint="Most of its characters are in a token of the text before or after it.",
            )
    return found


def _find_token(character: int, tokens: int, count_characters: Callable[[int], int]) -> int:
    """Return the token boundary nearest to a character, by bisection."""
    after = bisect.bisect_left(range(tokens + 1), character, key=count_characters)
    before = max(after - 1, 0)
    is_nearer = character - count_characters(before) < count_characters(after) - character
    return before if is_nearer else after


def _post(url: str, body: Mapping[str, Any], headers: Mapping[str, str] | None) -> Any:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json", **(headers or {})}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)
