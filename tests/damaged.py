"""Damage files of a folder in many ways, for tests of what reads them."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

# what a damaged or hostile JSON file may hold in place of any value, as text
HOSTILE = (
    "null", "true", "-1", "0", "1", "2", "1000000000", "1000000000000", "-99999999999999999999",
    "1" + "0" * 400, "1e308", "1e999", "NaN", "-Infinity", "0.5", '""', '"../../x"', '"/etc"',
    '"\\u0000"', '"<b>\\n"', "[]", "{}", "[[]]", '{"a": 1}', "[0, 0, 0]", '["a"]',
    "[" * 500 + "]" * 500, "[" * 100_000 + "]" * 100_000,
)  # fmt: skip


def flip(data: bytes, random: Random) -> bytes:
    """Return ``data`` with one to three bits flipped, a byte replaced, or its end missing."""
    if not data:
        return b"x"
    kind = random.randrange(4)
    if kind == 3:
        return data[: random.randrange(len(data))]
    changed = bytearray(data)
    for _ in range(1 if kind else random.randrange(1, 4)):
        # the first kilobytes are the header of a tensor file
        place = random.randrange(len(data) if random.random() < 0.5 else min(len(data), 4000))
        changed[place] = random.randrange(256) if kind == 2 else changed[place] ^ 1 << kind * 3
    return bytes(changed) if bytes(changed) != data else flip(data, random)


def replace_value(text: str, random: Random) -> str:
    """Return a JSON text with one value, or one key, replaced by something hostile."""
    content = json.loads(text)
    places = list(_places(content))
    parent, key = places[random.randrange(len(places))]
    kind = random.random()
    if kind < 0.15 and isinstance(parent, dict):
        value = parent.pop(key)
        if kind < 0.07:
            parent[f"{key}x"] = value
        return json.dumps(content)
    parent[key] = "@HOSTILE@"
    if kind > 0.97 and isinstance(parent, dict):  # twice in one object
        return json.dumps(content).replace('"@HOSTILE@"', f"1, {json.dumps(key)}: 2")
    return json.dumps(content).replace('"@HOSTILE@"', random.choice(HOSTILE))


def _places(content: Any) -> Iterator[tuple[Any, Any]]:
    keys = list(content) if isinstance(content, dict) else range(len(content))
    for key in keys:
        yield content, key
        if isinstance(content[key], dict | list):
            yield from _places(content[key])


@contextmanager
def damaged(file: Path, content: bytes) -> Iterator[None]:
    """Put ``content`` into ``file``, and afterwards what was there; times differ, for caches."""
    before = file.read_bytes()
    file.write_bytes(content)
    try:
        yield
    finally:
        file.write_bytes(before)


@contextmanager
def no_hang(seconds: int = 600) -> Iterator[None]:
    """Fail when the body takes longer; generous, for a machine that is busy with other things."""

    def late(signum: int, frame: FrameType | None) -> None:
        raise AssertionError(f"no end after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
