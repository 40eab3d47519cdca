"""JSON text read strictly: what json.loads would drop quietly is an error."""

from __future__ import annotations

from typing import Any

from .errors import ConstraintError


def unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object's members: a hook for json.loads. Raises ConstraintError for a key twice."""
    result = dict(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ConstraintError(f"duplicate key {twice!r} in an object", where=twice)
    return result
