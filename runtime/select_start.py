"""Where a select begins: the token trees to be scored, and a request for each.

Knows rows and one node at a time; nothing of runs, of the queue or of what is chosen.
"""

from __future__ import annotations

from collections.abc import Iterator

from umbel.lang.ir import Select

from .program_run import NodeTask
from .request import check_length
from .sampling import ChoiceScorer, ChoiceTree, uniform
from .select_task import SelectTask, TreeScoring
from .token_row import RowBuilder


def begin_select(
    task: NodeTask, rows: RowBuilder, request_ids: Iterator[int], max_seq_len: int
) -> SelectTask:
    """Return a select's trees and requests; the caller queues them.

    Raises ProgramError where a terminator is missing, RequestRejectedError for a prompt that
    leaves no room for the choices.
    """
    op, row = task.node.op, task.row
    assert isinstance(op, Select)
    whole = rows.encode_each(row, op.choices)
    frozen = len(row.ids)  # the scored context never backs into these
    scored = [ids[frozen:] for ids in rows.with_terminator(op, row, whole)]
    tree = ChoiceTree.build(scored, prefix=row.ids)
    if tree.num_context == 0:  # something must score the first token
        tree = tree.unconditional(rows.first_id)
    check_length(tree.num_context + max(map(len, tree.paths)), max_seq_len)
    u = float(uniform([task.seed(None, 0)], [0])[0]) if op.temperature > 0 else 0.0
    select = SelectTask(op, whole, _scoring(task, tree, next(request_ids)), uniform=u)
    if op.method == "unconditional_likelihood_normalized":
        plain = tree.unconditional(rows.first_id)
        select.unconditional = _scoring(task, plain, next(request_ids))
    return select


def _scoring(task: NodeTask, tree: ChoiceTree, request_id: int) -> TreeScoring:
    request = task.new_request(request_id, list(tree.token_ids), len(tree.token_ids))
    request.tree_parents = list(tree.parents)
    request.num_context = tree.num_context
    return TreeScoring(tree, request, ChoiceScorer(tree))
