"""Encodes the literal start of a run on its client's thread, before the engine's asks for it.

Knows graphs and rows; the ids stay with the tokenizer, where the engine's thread finds them.
"""

from __future__ import annotations

import logging

from umbel.lang.graph import RequestGraph
from umbel.lang.ir import Branch, Gen, RoleEnd, RoleStart, Select, Text

from .token_row import RowBuilder, TokenRow

logger = logging.getLogger(__name__)

_MIN_CHARS = 1024  # a shorter text takes less time than the walk to it is worth


def encode_ahead(rows: RowBuilder, piece: RequestGraph) -> None:
    """Encode what the gens and selects of a run's first piece follow, where that is literal text.

    What can't be encoded, or not yet, is left to the engine's thread, which says why.
    """
    if piece.base or piece.num_chars < _MIN_CHARS:
        return
    known: dict[int | None, TokenRow] = {None: TokenRow()}
    encoded: set[int] = set()  # ids of rows: those of a fork's branches are one
    for node in piece.nodes:
        row = known.get(node.parent)
        if row is None:
            continue
        try:
            match node.op:
                case Text(parts) if not node.deps:
                    text = "".join([part for part in parts if isinstance(part, str)])
                    known[node.id] = rows.append_text(row, text)
                case RoleStart(role):
                    known[node.id] = rows.start_role(row, role)
                case RoleEnd():
                    known[node.id] = rows.end_role(row)
                case Branch():
                    known[node.id] = row
                case Gen() | Select() if id(row) not in encoded:
                    encoded.add(id(row))
                    rows.encode(row)
                case _:
                    pass  # what follows depends on values
        except Exception:  # the node's, which fails by it: here nobody waits for anything
            logger.debug("%s is not encoded ahead", node.label, exc_info=True)
