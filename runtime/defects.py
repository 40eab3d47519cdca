"""Turns what nobody raised on purpose into errors of the tree; knows no run."""

from __future__ import annotations

import logging

from umbel.lang.errors import EngineError, UmbelError
from umbel.lang.graph import GraphNode

logger = logging.getLogger(__name__)


def defect(what: str, cause: BaseException) -> EngineError:
    """Return the error of what nobody raised on purpose; the cause is chained."""
    error = EngineError(f"{what}: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error


def node_error(node: GraphNode, cause: BaseException) -> UmbelError:
    """Return what a node fails with; a defect is logged."""
    if isinstance(cause, UmbelError):
        return cause
    logger.error("%s met a defect", node.label, exc_info=cause)
    return defect(f"{node.label} failed", cause)
