"""What an engine counts of itself, by name: one table of all counters with what they mean.

Knows numbers; where they come from is the engine's business.
"""

from __future__ import annotations

from dataclasses import dataclass

from .scheduler import Batch

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
    "memory_shortages": "passes that ran out of memory",
    "retried": "requests of passes that raised, which ran again",
    "prompt_tokens": "tokens of all prompts (with track_bound)",
    "least_prefill": "of these, what no cache could have held (with track_bound)",
    "programs": "programs that have ended",
    "queue_s": "seconds in which their nodes waited to be scheduled",
    "grammar_s": "seconds in which they waited for their constraints to compile",
    "prefill_s": "seconds from being scheduled to the first token",
    "decode_s": "seconds from the first token to the last",
    "tool_s": "seconds in which programs had nothing here to wait for",
    "saved_tokens": "prompt tokens of their nodes that were found in the cache",
}
GAUGES: dict[str, str] = {
    "kv_slots": "tokens the KV pool holds",
    "kv_slots_free": "tokens of the KV pool in no use",
    "running": "requests that run now",
    "waiting": "requests that wait",
    "active_programs": "programs that have not ended",
    "step_limit": "tokens that a step may compute for now; fewer after a shortage of memory",
    "hit_rate": "share of the prompts' tokens found in the cache (with track_bound)",
    "hit_rate_bound": "the most that it could be (with track_bound)",
}


@dataclass(slots=True)
class StepCounters:
    """Sums over an engine's steps."""

    steps: int = 0
    step_s: float = 0.0
    budget_tokens: int = 0
    step_tokens: int = 0

    def step_done(self, batch: Batch, budget: int, seconds: float) -> None:
        """Count a step, whether its pass went well or not."""
        self.steps += 1
        self.step_s += seconds
        self.budget_tokens += budget
        self.step_tokens += batch.num_tokens
