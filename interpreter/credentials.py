"""Takes what looks like a credential out of text that will be kept; reads no credentials."""

from __future__ import annotations

import re

import msgspec

from umbel.lang.errors import WireError

_REMOVED = "[removed]"
_PATTERNS = (
    re.compile(r"(?i)(\b(?:bearer|basic)\s+)[A-Za-z0-9._~+/=-]{6,}"),
    re.compile(
        r"(?i)((?:api[-_ ]?key|access[-_ ]?token|authorization|password|secret|token)"
        r"[\"']?\s*[:=]\s*[\"']?)(?!bearer\b|basic\b)[^\s\"'&,;}]{6,}"
    ),
    re.compile(r"()\b(?:sk|pk|hf|gh[opsu]|xox[abp])[-_][A-Za-z0-9_*-]{12,}"),
    re.compile(r"([a-z][a-z0-9+.-]*://)[^\s/@]+(?=@)"),
)


def without_credentials(text: str) -> str:
    """Return `text` without API keys, authorization headers and passwords in addresses.

    Meant for messages of errors, which quote what a service said; it goes by form, not by value.
    """
    for pattern in _PATTERNS:
        text = pattern.sub(rf"\1{_REMOVED}", text)
    return text


def clean_error(error: WireError) -> WireError:
    """Return an error without credentials in its message, data and causes."""
    data = {
        key: without_credentials(value) if isinstance(value, str) else value
        for key, value in error.data.items()
    }
    cause = None if error.cause is None else clean_error(error.cause)
    return msgspec.structs.replace(
        error, message=without_credentials(error.message), data=data, cause=cause
    )
