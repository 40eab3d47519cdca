"""Where a program's time went: counted as its nodes end, summed up and logged when it does.

Knows times and counts; nothing of graphs but which nodes a node builds on.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from umbel.lang.graph import GraphNode
from umbel.lang.results import NodeResult

from .request import Request

PROGRAM_LOGGER = "umbel.programs"
_log = logging.getLogger(PROGRAM_LOGGER)


@dataclass(slots=True)
class NodeSums:
    """Sums over nodes that have used the model. Seconds; siblings' add up."""

    queue_s: float = 0.0  # from the moment that a node could run to its first pass
    grammar_s: float = 0.0  # before that, for its constraint and its healed prompt
    prefill_s: float = 0.0  # from the first pass to the first token; a select's whole time
    decode_s: float = 0.0  # from the first token to the last
    tool_s: float = 0.0  # in which the program had nothing here to wait for
    prompt_tokens: int = 0
    saved_tokens: int = 0  # of these, found in the cache
    completion_tokens: int = 0
    retractions: int = 0

    def add(self, other: NodeSums) -> None:
        """Add another program's sums."""
        self.queue_s += other.queue_s
        self.grammar_s += other.grammar_s
        self.prefill_s += other.prefill_s
        self.decode_s += other.decode_s
        self.tool_s += other.tool_s
        self.prompt_tokens += other.prompt_tokens
        self.saved_tokens += other.saved_tokens
        self.completion_tokens += other.completion_tokens
        self.retractions += other.retractions


@dataclass(slots=True)
class ProgramTimes:
    """What one program's nodes took. Times are on the engine's clock."""

    opened: float = 0.0
    sums: NodeSums = field(default_factory=NodeSums)
    num_failed: int = 0
    _idle_since: float = 0.0  # since when nothing of it has been left to do; 0.0: something is
    _paths: dict[int, float] = field(default_factory=dict)  # by node, of those that took time

    def took(self, result: NodeResult, queued: float, requests: Iterable[Request]) -> float:
        """Count a node that used the model; return the seconds that the model took for it."""
        sums, timings, usage = self.sums, result.timings, result.usage
        first = timings.first_token or timings.finished
        sums.grammar_s += queued - timings.ready
        sums.queue_s += timings.scheduled - queued
        sums.prefill_s += first - timings.scheduled
        sums.decode_s += timings.finished - first
        sums.prompt_tokens += usage.prompt_tokens
        sums.saved_tokens += usage.cached_tokens
        sums.completion_tokens += usage.completion_tokens
        sums.retractions += sum(request.num_retractions for request in requests)
        return timings.finished - timings.scheduled

    def follows(self, node: GraphNode, seconds: float) -> None:
        """Note a node's end: what the model took along the longest chain of nodes up to it."""
        paths = self._paths
        edges = node.deps if node.parent is None else (*node.deps, node.parent)
        behind = max((paths.get(edge, 0.0) for edge in edges), default=0.0)
        if behind + seconds > 0:
            paths[node.id] = behind + seconds

    def idles(self, now: float) -> None:
        """Note that every node has ended and more may come."""
        if not self._idle_since:
            self._idle_since = now

    def goes_on(self, now: float) -> None:
        """Note that there is something to do again, or that nothing more comes."""
        if self._idle_since:
            self.sums.tool_s += now - self._idle_since
            self._idle_since = 0.0

    @property
    def critical_s(self) -> float:
        """The least that the program could have taken: no waiting along its longest chain."""
        return max(self._paths.values(), default=0.0)


class ProgramReports:
    """Sums over the programs that have ended, and a line in the log for each."""

    def __init__(self) -> None:
        self.num_programs = 0
        self.sums = NodeSums()

    def ended(self, run_id: int, num_nodes: int, times: ProgramTimes, now: float) -> None:
        """Count a program that is over; at INFO log it, as one line of JSON."""
        times.goes_on(now)
        self.num_programs += 1
        self.sums.add(times.sums)
        # a line for each program is for those who ask this very logger for it
        if _log.level != logging.NOTSET and _log.isEnabledFor(logging.INFO):
            report = _report(run_id, num_nodes, times, now)
            _log.info("%s", json.dumps(report), extra={"program": report})


def _report(run_id: int, num_nodes: int, times: ProgramTimes, now: float) -> dict[str, Any]:
    seconds = now - times.opened
    critical = times.critical_s
    own = max(0.0, seconds - times.sums.tool_s)
    figures = {
        name: round(value, 6) if isinstance(value, float) else value
        for name, value in asdict(times.sums).items()
    }
    return {
        "run": run_id,
        "nodes": num_nodes,
        "failed": times.num_failed,
        "seconds": round(seconds, 6),
        **figures,
        "critical_path_s": round(critical, 6),
        # 1: the program never waited but for its own longest chain; null: nothing used the model
        "critical_path_ratio": round(max(1.0, own / critical), 3) if critical > 0 else None,
    }
