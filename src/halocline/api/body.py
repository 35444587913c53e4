"""A request's body: read up to a limit, then parsed strictly. Each fault is an ApiError that says what and where."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from starlette.requests import Request

from halocline.api.errors import ApiError
from halocline.units import MIB, format_bytes

MAX_BODY_BYTES = 8 * MIB
SWALLOWED_BYTES = 64 * MIB
"""So much of a body that is too large is read and dropped: a client that is still sending would not see the answer."""


async def read_object(request: Request) -> dict[str, Any]:
    """Return the JSON object that the request's body holds."""
    return parse_object(await read_body(request))


async def read_body(request: Request) -> bytes:
    """Return the request's body as it is; raises ApiError 413 when it is too large."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > SWALLOWED_BYTES:
        raise _too_large(int(declared))
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size <= MAX_BODY_BYTES:
            parts.append(part)
        elif size > SWALLOWED_BYTES:
            break
    if size > MAX_BODY_BYTES:
        raise _too_large(size)
    return b"".join(parts)


def _too_large(size: int) -> ApiError:
    return ApiError(
        413,
        f"the body has {size} bytes; the limit is {MAX_BODY_BYTES} ({format_bytes(MAX_BODY_BYTES)})",
        code="body_too_large",
    )


def parse_object(raw: bytes) -> dict[str, Any]:
    """Parse strictly: UTF-8, one object, no key twice, no NaN or Infinity, no lone surrogates."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _bad(f"the body is not UTF-8: byte {error.start} is 0x{raw[error.start]:02x}") from error
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as error:
        raise _bad("the body is nested too deeply") from error
    except UnicodeEncodeError as error:
        raise _bad("the body holds half of a surrogate pair, which is no character") from error
    except ValueError as error:
        raise _bad(f"the body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise _bad(f"the body must be a JSON object, not {json_type(value)}")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        double = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise _bad(f"the key {double!r} stands twice in one object", param=double)
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise _bad(f"the body holds {name}, which is no JSON number")


def _bad(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code="invalid_body")


def json_type(value: object) -> str:
    """Name a value's type as people who write JSON do."""
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
