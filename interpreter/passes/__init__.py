"""Rewrites of request graphs, between what a program writes and what a backend is handed."""

from .common_trunk import BatchTrunk, common_trunk
from .fold_selects import fold_one_choice_selects
from .gang_siblings import gang_siblings
from .merge_literals import merge_literals
from .rewritten import Pass, Rewritten
from .session import PASSES, open_session, rewrite

__all__ = [
    "PASSES",
    "BatchTrunk",
    "Pass",
    "Rewritten",
    "common_trunk",
    "fold_one_choice_selects",
    "gang_siblings",
    "merge_literals",
    "open_session",
    "rewrite",
]
