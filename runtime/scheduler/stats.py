"""What a scheduler has done over its life, in counts."""

from __future__ import annotations

from dataclasses import dataclass

from .batch import ScheduledRequest


@dataclass(slots=True)
class SchedulerStats:
    """Counts over the scheduler's life, of rows unless said otherwise."""

    steps: int = 0
    tokens_prefilled: int = 0  # computed context rows that their request did not sample
    tokens_decoded: int = 0  # computed rows that their request had sampled
    tree_tokens: int = 0  # computed rows of selects' token trees
    cached_tokens: int = 0  # found in the cache by a request that was to compute them
    retractions: int = 0  # requests
    program_retractions: int = 0  # programs whose running requests were all taken back
    deferred: int = 0  # requests that waited for a running one to compute what they share
    failed_steps: int = 0

    def count_prefill(self, scheduled: ScheduledRequest) -> int:
        """Count a step's rows of one request that begin in its prompt; return those prefilled."""
        request, start, end = scheduled.request, scheduled.start, scheduled.end
        prompt_end = min(end, request.num_prompt)
        self.tokens_decoded += end - prompt_end
        if request.tree_parents:
            self.tree_tokens += max(0, end - max(start, request.num_context))
            prompt_end = min(prompt_end, request.num_context)
        prefilled = max(0, prompt_end - start)
        self.tokens_prefilled += prefilled
        return prefilled
