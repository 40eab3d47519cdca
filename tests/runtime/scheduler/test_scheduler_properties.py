"""The scheduler under everything at once: no slot lost, no request lost, no wrong slot read."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from tests.runtime.scheduler.slot_truth import SequenceInputs, SlotTruth, step_inputs

from umbel.lang.errors import RequestRejectedError
from umbel.runtime.kv_cache import EVICTION_POLICIES, PageAllocator, Promise, RadixCache, RadixNode
from umbel.runtime.request import Request, RequestStatus
from umbel.runtime.scheduler import POLICIES, Batch, Scheduler, SchedulerLimits


class SchedulerMachine(RuleBasedStateMachine):
    """`live` is every request that was added and has not ended, with the row it should have."""

    @initialize(
        num_slots=st.integers(48, 256),
        budget=st.integers(1, 40),
        max_running=st.integers(1, 9),
        max_chunk=st.none() | st.integers(1, 12),
        page_size=st.sampled_from([1, 1, 2, 16]),
        policy=st.sampled_from(sorted(POLICIES)),
        eviction=st.sampled_from(sorted(EVICTION_POLICIES)),
        cache_enabled=st.booleans() | st.just(True),
        watermark=st.sampled_from([0.0, 0.1]),
        seed=st.integers(0, 2**32),
    )
    def start(
        self,
        num_slots: int,
        budget: int,
        max_running: int,
        max_chunk: int | None,
        page_size: int,
        policy: str,
        eviction: str,
        cache_enabled: bool,
        watermark: float,
        seed: int,
    ) -> None:
        self.random = random.Random(seed)
        self.cache = RadixCache(page_size)
        num_slots -= num_slots % page_size
        self.num_slots, self.budget, self.max_running = num_slots, budget, max_running
        self.max_chunk = max_chunk or budget
        self.scheduler = Scheduler(
            self.cache,
            PageAllocator(num_slots, page_size),
            SchedulerLimits(budget, max_running, max_chunk, watermark, max_wait_steps=16),
            policy=policy,
            eviction=eviction,
            cache_enabled=cache_enabled,
        )
        self.truth = SlotTruth()
        self.live: dict[Request, list[int]] = {}
        self.rows: list[list[int]] = [[1]]  # rows that new ones may continue
        self.pins: list[RadixNode] = []
        self.promises: list[Promise] = []
        self.batch: Batch | None = None
        self.inputs: list[SequenceInputs] = []
        self.num_added = 0

    # ---- requests come

    def row(self, size: int) -> list[int]:
        """A row that often continues part of an earlier one."""
        known = self.random.choice(self.rows)
        start = known[: self.random.randint(0, len(known))]
        row = [*start, *(self.random.randint(0, 2) for _ in range(size))] or [0]
        row = row[: self.num_slots * 3 // 4]
        self.rows.append(row)
        return row

    def add(self, **fields: Any) -> None:
        request = Request(
            request_id=self.num_added,
            program_id=self.num_added // 3,
            node_id=self.num_added % 3,
            arrival=self.num_added // 3,
            depth=self.random.randint(0, 2),
            gang=self.random.choice(["", "a", "b"]),
            priority=self.random.randint(0, 2),
            namespace=self.random.choice(["", "", "", "other"]),
            **fields,
        )
        self.num_added += 1
        rows = len(request.token_ids) if request.tree_parents else request.limit - 1
        if -(-rows // self.cache.page_size) * self.cache.page_size > self.num_slots:
            with pytest.raises(RequestRejectedError, match="pool holds"):
                self.scheduler.add(request)
        else:
            self.scheduler.add(request)
            self.live[request] = list(request.token_ids)

    @rule(size=st.integers(0, 40), output=st.integers(1, 60))
    def add_gen(self, size: int, output: int) -> None:
        row = self.row(size)
        self.add(token_ids=row, limit=len(row) + output)

    @rule(size=st.integers(0, 30), tree=st.integers(1, 10))
    def add_select(self, size: int, tree: int) -> None:
        context = self.row(size)
        parents = [
            self.random.randint(len(context) - 1, row - 1)
            for row in range(len(context), len(context) + tree)
        ]
        tokens = [*context, *(self.random.randint(0, 2) for _ in parents)]
        self.add(
            token_ids=tokens, limit=len(tokens), tree_parents=parents, num_context=len(context)
        )

    # ---- steps

    @precondition(lambda self: self.batch is None)
    @rule()
    def schedule(self) -> None:
        batch = self.scheduler.schedule()
        for request, error in self.scheduler.take_rejected():
            assert self.pins, "only what others have pinned can be in the way"
            assert error.reason == "cannot_fit"
            self.ended(request)
        if batch is None:
            return
        self.batch = batch
        self.inputs = step_inputs(batch)
        assert 0 < batch.num_tokens <= self.budget
        assert self.scheduler.num_running <= self.max_running
        assert len({s.request for s in batch.requests}) == len(batch.requests)
        for i, scheduled in enumerate(batch.requests):
            request = scheduled.request
            assert request in self.live
            assert request.num_computed == scheduled.start < scheduled.end
            assert scheduled.num_tokens <= self.max_chunk
            if i < batch.num_decodes:
                assert scheduled.start >= request.num_prompt
                assert scheduled.num_tokens == 1
                assert not request.tree_parents

    @precondition(lambda self: self.batch is not None)
    @rule(stalls=st.booleans())
    def complete(self, stalls: bool) -> None:
        """The forward runs; what reached its end is sampled, but perhaps not all of it at once."""
        batch = self.batch
        assert batch is not None
        held = [s for s in batch.requests if s.request in self.live and s.request.slots]
        self.truth.run(self.inputs)
        self.scheduler.complete(batch)
        self.batch = None
        for scheduled in held:
            if scheduled.request in self.live and scheduled.reaches_end:
                if stalls and self.random.random() < 0.5:
                    continue
                self.sample(scheduled.request)

    @rule()
    def sample_what_stalled(self) -> None:
        for request in list(self.live):
            if request.status is RequestStatus.RUNNING and request.num_pending == 0:
                self.sample(request)

    def sample(self, request: Request) -> None:
        if request.tree_parents:
            path: list[int] = []
            row = self.random.randrange(request.num_context - 1, len(request.token_ids))
            while row >= request.num_context:
                path.append(row)
                row = request.tree_parents[row - request.num_context]
            self.finish(request, path[::-1])
            return
        for _ in range(self.random.choice([1, 1, 1, 3])):  # 3: forced text is jumped over
            if len(request.token_ids) < request.limit:
                request.token_ids.append(self.random.randint(0, 2))
        self.live[request] = list(request.token_ids)
        if len(request.token_ids) >= request.limit or self.random.random() < 0.1:
            end = self.random.randint(0, request.num_computed)
            keep = list(range(self.random.randint(0, request.num_shared), end))
            self.finish(request, self.random.choice([None, keep]))

    def finish(self, request: Request, keep: list[int] | None) -> None:
        tokens, namespace = list(request.token_ids), request.namespace
        shared = request.num_shared
        context = tokens[: request.num_context] if request.tree_parents else []
        self.scheduler.finish(request, keep)
        page_size = self.cache.page_size
        if self.scheduler.cache_enabled and keep:
            kept = tokens[: min(shared, keep[0])] + [tokens[row] for row in keep]
            if request.tree_parents:
                kept = context + [tokens[row] for row in keep]
            if self.cache.page_size == 1:
                assert self.cache.probe(kept, namespace).num_tokens == len(kept)
            elif not request.tree_parents:  # a select's rows may lie apart
                assert self.cache.probe(kept, namespace).num_tokens > len(kept) - page_size
            self.rows.append(kept)
        self.ended(request)

    def ended(self, request: Request) -> None:
        assert request.status is RequestStatus.FINISHED
        assert not request.slots
        del self.live[request]

    @precondition(lambda self: self.batch is not None)
    @rule()
    def fail(self) -> None:
        assert self.batch is not None
        self.truth.break_down(self.inputs)
        self.scheduler.fail(self.batch)
        self.batch = None

    # ---- whatever may happen at any time

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0))
    def abort(self, which: int) -> None:
        request = list(self.live)[which % len(self.live)]
        self.scheduler.abort(request)
        self.ended(request)
        self.scheduler.abort(request)  # once more does nothing

    @rule(which=st.integers(0))
    def retract(self, which: int) -> None:
        running = [r for r in self.live if r.status is RequestStatus.RUNNING]
        if running:
            request = running[which % len(running)]
            self.scheduler.retract(request)
            assert request.status is RequestStatus.WAITING

    @precondition(lambda self: len(self.pins) < 3 and self.batch is None)
    @rule()
    def pin(self) -> None:
        node = self.cache.match_prefix(self.random.choice(self.rows)).node
        self.cache.lock(node)
        self.pins.append(node)

    @precondition(lambda self: self.pins and self.batch is None)
    @rule()
    def unpin(self) -> None:
        self.cache.unlock(self.pins.pop())

    @rule(
        program=st.integers(0, 6),
        place=st.integers(0, 3),
        cut=st.integers(0, 9),
        steps=st.none() | st.integers(0, 9),
    )
    def hold(self, program: int, place: int, cut: int, steps: int | None) -> None:
        row = self.random.choice(self.rows)
        self.scheduler.holds.hold(program, place, row[: len(row) - cut], steps)

    @rule(program=st.integers(0, 6), place=st.integers(0, 3), steps=st.integers(0, 9))
    def expect(self, program: int, place: int, steps: int) -> None:
        self.scheduler.holds.expect(program, place, steps)

    @rule(program=st.integers(0, 6), place=st.integers(0, 4))
    def drop(self, program: int, place: int) -> None:
        if place == 4:
            self.scheduler.holds.drop_program(program)
        else:
            self.scheduler.holds.drop(program, place)

    @rule(program=st.integers(0, 6))
    def retract_program(self, program: int) -> None:
        self.scheduler.retract_program(program)

    @precondition(lambda self: len(self.promises) < 3)
    @rule()
    def promise(self) -> None:
        self.promises.append(self.scheduler.holds.promise(self.random.choice(self.rows)))

    @precondition(lambda self: self.promises)
    @rule()
    def unpromise(self) -> None:
        promise = self.promises.pop()
        self.scheduler.holds.unpromise(promise)
        self.scheduler.holds.unpromise(promise)  # once more does nothing

    @precondition(lambda self: self.batch is None)
    @rule()
    def reset_cache(self) -> None:
        if self.scheduler.num_running == 0:
            self.scheduler.reset_cache()
            assert self.cache.num_evictable == 0

    # ---- what always holds

    @invariant()
    def nothing_is_lost(self) -> None:
        self.scheduler.check(self.pins)
        assert self.scheduler.num_running + self.scheduler.num_waiting == len(self.live)
        for request, tokens in self.live.items():
            assert request.token_ids == tokens, "a request lost what it had sampled"
        if not self.scheduler.cache_enabled:
            assert self.cache.total == 0

    def teardown(self) -> None:
        """Whatever state it is in: without new requests, all end, and every slot comes back."""
        if not hasattr(self, "scheduler"):
            return
        if self.batch is not None:
            self.complete(False)
        while self.pins:
            self.unpin()
        rows = sum(max(r.limit, len(r.token_ids)) for r in self.live)
        for _ in range(20 + 20 * rows):
            if not self.live:
                break
            self.schedule()
            if self.batch is not None:
                self.complete(False)
            self.sample_what_stalled()
            self.nothing_is_lost()
        assert not self.live, "requests starve"
        self.scheduler.reset_cache()
        assert self.scheduler.num_free == self.num_slots
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(stateful_step_count=60, phases=[Phase.generate, Phase.shrink])
