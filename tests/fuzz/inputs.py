"""Draw bad input: bytes with changed parts, JSON with wrong values, and strings that break output."""

from __future__ import annotations

import copy
from random import Random
from typing import Any

STRINGS = (
    "",
    " ",
    "\0",
    "a\0b",
    "\n",
    "\r\n\t",
    "</script>",
    "<!--<script>",
    "]]>",
    "&lt;&amp;",
    "\"'`${x}",
    "\u2028\u2029",
    "\ud800",
    "\udfff\ud800",
    "\ufeff",
    "\u202e\u2066abc",
    "\x1b[31mred\x1b]0;title\x07",
    "e\u0301" * 40,
    "👩‍👩‍👧‍👦🏳️‍🌈",
    "%s%n{0}{x}",
    "../../outside",
    "/etc/passwd",
    "..\\..\\outside",
    "C:\\con",
    "NaN",
    "-Infinity",
    "1e999",
    "9" * 400,
    "x" * 5000,
    "[/bold][red]",
    "$(id)",
    "-",
    "--",
    "\\u0000",
)
VALUES = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    7,
    -(2**31),
    2**31,
    2**63,
    -(2**63) - 1,
    10**30,
    10**400,
    0.0,
    -0.0,
    0.5,
    1e-320,
    1e308,
    float("inf"),
    float("-inf"),
    float("nan"),
    [],
    {},
    [[]],
    [None],
    [0, 0],
    {"": None},
    {"kind": "top"},
)
BYTES = (0x00, 0x01, 0x20, 0x22, 0x2C, 0x3A, 0x5B, 0x5D, 0x7B, 0x7D, 0x7F, 0x80, 0xC0, 0xFF, 0x0A)
CHUNKS = (
    b"\0" * 16,
    b"\xff" * 8,
    b"9" * 20,
    b"-1",
    b"1e999",
    b"NaN",
    b"null",
    b"[" * 3000,
    b'{"a":' * 2000,
    b'"' * 3,
    b"\xf0\x9f\x98",
    b"\xed\xa0\x80",
    b"\\ud800",
    b"\n",
    b"\r\n",
    b"\x1f\x8b\x08\x00",
    b"PAR1",
    b"PK\x03\x04",
)


def draw_string(rng: Random) -> str:
    """Draw a string: a known bad one, several joined, or random code points."""
    kind = rng.randrange(4)
    if kind == 0:
        return "".join(chr(rng.choice((rng.randrange(128), rng.randrange(0x3000), rng.randrange(0x110000))))
                       for _ in range(rng.randrange(12)))  # fmt: skip
    if kind == 1:
        return rng.choice(STRINGS) + rng.choice(STRINGS)
    return rng.choice(STRINGS)


def draw_value(rng: Random) -> Any:
    """Draw a JSON value of any type."""
    return draw_string(rng) if rng.random() < 0.3 else copy.deepcopy(rng.choice(VALUES))


def change_bytes(rng: Random, data: bytes) -> bytes:
    """Change bytes: flip bits, set, insert, remove, repeat or swap parts, or cut the end, one to four times."""
    changed = bytearray(data)
    for _ in range(1 + rng.randrange(4)):
        size = len(changed)
        at = rng.randrange(size + 1)
        length = min(size - at, 1 << rng.randrange(8))
        kind = rng.randrange(8)
        if kind == 0 and at < size:
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and at < size:
            changed[at] = rng.choice(BYTES)
        elif kind == 2:
            changed[at:at] = rng.choice(CHUNKS)
        elif kind == 3:
            del changed[at : at + length]
        elif kind == 4:
            changed[at:at] = changed[at : at + length]
        elif kind == 5:
            changed[at : at + length] = rng.randbytes(length)
        elif kind == 6:
            del changed[at:]
        elif at + 8 <= size:
            number = rng.choice((0, 1, 2**31 - 1, 2**32, 2**63 - 1, 2**64 - 1, rng.randrange(1 << 40)))
            changed[at : at + 8] = number.to_bytes(8, "little")
    return bytes(changed)


def change_json(rng: Random, value: Any) -> Any:
    """Change a JSON value: replace, remove, repeat or rename one to three parts of it."""
    changed = copy.deepcopy(value)
    for _ in range(1 + rng.randrange(3)):
        changed = _change_part(rng, changed)
    return changed


def _change_part(rng: Random, root: Any) -> Any:
    node, parent, key = root, None, None
    # Go down a random path; deep parts are reached as often as the top.
    while isinstance(node, dict | list) and node and rng.random() < 0.85:
        parent = node
        key = rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
        node = node[key]
    if parent is None:
        return draw_value(rng)
    kind = rng.randrange(8)
    if kind == 0:
        del parent[key]
    elif kind == 1 and isinstance(parent, dict):
        parent[draw_string(rng)] = parent.pop(key)
    elif kind == 2 and isinstance(parent, list):
        parent.insert(key, copy.deepcopy(node))
    elif kind == 3:
        parent[key] = [copy.deepcopy(node)]
    elif kind == 4 and isinstance(node, int) and not isinstance(node, bool):
        parent[key] = rng.choice(
            (
                -node,
                node + 1,
                node - 1,
                node * 1000,
                node << 40,
                node / 2 if abs(node) < 2**60 else 0.5,
                str(node),
            )
        )
    elif kind == 5 and isinstance(parent, list) and len(parent) > 1:
        parent[key] = copy.deepcopy(rng.choice(parent))
    else:
        parent[key] = draw_value(rng)
    return root
