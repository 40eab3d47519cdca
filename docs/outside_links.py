"""Turns links that leave the documentation into plain text, as the site is built.

The pages are read in the repository too, where such links lead to its files; the site has none.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent

_LINK = re.compile(r"\[(?P<label>[^\]]+)\]\((?P<target>\.\./[^)#]+)[^)]*\)")


def on_page_markdown(markdown: str, /, *, page: Any, **_: Any) -> str:
    """Return a page's text for the site. What leads nowhere is kept, for mkdocs to complain of."""
    folder = (DOCS / page.file.src_uri).parent

    def plain(link: re.Match[str]) -> str:
        target = (folder / link["target"]).resolve()
        if target.is_relative_to(DOCS) or not target.exists():
            return link[0]
        return link["label"]

    return _LINK.sub(plain, markdown)
