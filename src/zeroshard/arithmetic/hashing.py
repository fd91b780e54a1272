"""The digest under which files hold their blocks: xxHash, against damage and not against forgery."""

from __future__ import annotations

from typing import Any

import xxhash


def digest(data: Any) -> str:
    """Return the xxh3-128 of a text or of bytes as 32 hexadecimal digits, the form that files hold."""
    return str(xxhash.xxh3_128_hexdigest(data.encode() if isinstance(data, str) else data))
