"""What an engine counts of itself, by name: one table of all counters with what they mean.

Knows numbers; where they come from is the engine's business.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass

STEP_LOGGER = "umbel.steps"
_log = logging.getLogger(STEP_LOGGER)

# Every name of Engine.stats(), with what it means. docs/engine.md shows this table.
COUNTERS: dict[str, str] = {
    "steps": "forward passes",
    "failed_steps": "of these, passes that raised and were taken back",
    "step_s": "seconds spent in steps",
    "forward_s": "seconds of these spent in computing passes, or in launching them on a device",
    "wait_s": "seconds of these spent in waiting for what a pass samples",
    "host_s": "seconds of these left: scheduling, sampling on the host, graphs, events",
    "budget_tokens": "tokens that the steps might have computed, by their budget",
    "step_tokens": "tokens that they computed",
    "useful_tokens": "of these, those of passes that went well and of rows that had not ended",
    "tokens_prefilled": "tokens computed that were not sampled",
    "tokens_decoded": "tokens sampled",
    "tree_tokens": "tokens of selects' trees",
    "cached_tokens": "prompt tokens found in the prefix cache",
    "retractions": "requests that gave their KV back and ran again",
    "program_retractions": "programs that gave all their KV back and ran on later",
    "memory_shortages": "passes, and pieces of their logits, that ran out of memory",
    "retried": "requests of passes that raised, which ran again",
    "grammars_refused": "constrained samples whose automaton found no room on the device",
    "prompt_tokens": "tokens of all prompts",
    "least_prefill": "of these, what no cache could have held (with track_bound)",
    "programs": "programs that have ended, of which the next six are sums",
    "queue_s": "seconds from the moment that a node could run to its first pass",
    "grammar_s": "seconds before that, in which it waited for its constraint",
    "prefill_s": "seconds from a node's first pass to its first token",
    "decode_s": "seconds from a node's first token to its last",
    "tool_s": "seconds in which a program had nothing here to wait for",
    "saved_tokens": "prompt tokens of nodes that were found in the cache",
}
GAUGES: dict[str, str] = {
    "kv_slots": "tokens the KV pool holds",
    "kv_slots_free": "tokens of the KV pool in no use",
    "running": "requests that run now",
    "waiting": "requests that wait",
    "active_programs": "programs that have not ended",
    "device_grammars": "constrained samples that are masked by their automaton on the device now",
    "step_limit": "tokens that a step may compute for now; fewer after a shortage of memory",
    "hit_rate": "share of the prompts' tokens found in the cache",
    "hit_rate_bound": "the most that it could be (with track_bound)",
}


@dataclass(slots=True)
class StepCounters:
    """Sums over an engine's steps and requests."""

    steps: int = 0
    step_s: float = 0.0
    host_s: float = 0.0
    budget_tokens: int = 0
    step_tokens: int = 0
    prompt_tokens: int = 0

    def step_done(self, num_tokens: int, budget: int, seconds: float, device_s: float) -> None:
        """Count a step, whether its pass went well or not; at DEBUG log it.

        A step of no tokens only takes up what the last one brought, and is counted with it.
        `device_s` is what all steps so far have spent in passes and in waiting for them.
        """
        self.step_s += seconds
        host_s = self.step_s - device_s - self.host_s
        self.host_s += host_s
        if not num_tokens:
            return
        self.steps += 1
        self.budget_tokens += budget
        self.step_tokens += num_tokens
        if _log.isEnabledFor(logging.DEBUG):
            step = {
                "step": self.steps,
                "tokens": num_tokens,
                "budget": budget,
                "us": round(1e6 * seconds),
                "host_us": round(1e6 * host_s),
            }
            _log.debug("%s", json.dumps(step), extra={"step": step})


def share(part: int, whole: int) -> float:
    """Return a part of a whole, at most 1: what ran again was found again."""
    return min(1.0, part / whole) if whole else 0.0
