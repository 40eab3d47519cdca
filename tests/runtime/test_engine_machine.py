"""The whole engine under everything at once: programs come, grow, end early and are retracted.

After every step the pages add up; in the end every program has ended, and those that nobody stopped
have said what they say alone, on an engine without a cache. `--hypothesis-profile=long` runs 50,000
examples on hash logits and 1,000 on a model of two layers.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from tests.support.engine_harness import Collector, check_idle, drive, make_engine, make_runner
from tests.support.equality import assert_same_outcome
from tests.support.short_memory import PLACES, Place, short_of_memory
from tests.support.tiny_model import tiny_runner
from torch import Tensor

from umbel.lang.graph import GraphNode, RequestGraph
from umbel.lang.ir import Branch, Gen, Join, JoinPolicy, Op, Ref, Select, Text
from umbel.lang.results import RunOptions
from umbel.lang.sampling_params import SamplingParams
from umbel.runtime.engine import Engine
from umbel.runtime.engine_session import EngineSession
from umbel.runtime.kv_cache import EVICTION_POLICIES, Promise
from umbel.runtime.model_runner.runner import Runner
from umbel.runtime.scheduler import POLICIES

pytestmark = pytest.mark.slow
LONGEST = 60  # tokens of a row: what the smallest pool takes, whatever its pages
MOST_NEW = 24  # tokens of a gen
TRUNKS = (None, None, "abcabcabcabc", "0123456789" * 2, "system text ", "0123456789" * 4)
TEXTS = ("a", "abc ", "xyxy", "bca", "no ")
STEMS = ("", "abcabcabcabcabcabc", "0123456789" * 2, "system text ")
CHOICES = (("yes", "no"), ("a", "b", "c"), ("abc", "abd", "xy"))

MANY = {"dev": 2000, "ci": 2000, "long": 50_000}
FEW = {"dev": 100, "ci": 100, "long": 1000}


@dataclass
class Program:
    """One run: its graph so far, and where it may go on."""

    session: EngineSession
    collector: Collector
    options: RunOptions
    nodes: list[GraphNode] = field(default_factory=list)
    num_sent: int = 0
    tip: int | None = None
    lengths: dict[int | None, int] = field(default_factory=lambda: {None: 1})  # tokens, at most
    is_closed: bool = False
    was_stopped: bool = False  # cancelled in part or whole, or out of time


class EngineMachine(RuleBasedStateMachine):
    """Random programs on a random engine, with hash logits: sampled values are equal too."""

    greedy = False

    def new_runner(self, num_slots: int, seed: int) -> Runner:
        return make_runner(num_slots=num_slots, seed=seed)

    @initialize(
        num_pages=st.sampled_from([64, 64, 64, 100, 512]),
        page_size=st.sampled_from([1, 16]),
        policy=st.sampled_from(["program", "program", *sorted(POLICIES)]),
        eviction=st.sampled_from(sorted(EVICTION_POLICIES)),
        overlap=st.booleans(),
        budget=st.integers(1, 40),
        max_running=st.integers(2, 8),
        seed=st.integers(0, 2**32),
    )
    def start(self, **drawn: Any) -> None:
        seed, page_size = drawn.pop("seed"), drawn["page_size"]
        self.random = random.Random(seed)
        # few pages whatever their size, so that programs are in each other's way
        num_pages = drawn.pop("num_pages")
        num_slots = num_pages if page_size == 1 else self.random.choice([64, 64, 96, 256])
        self.options = {
            "max_step_tokens": drawn.pop("budget"),
            "max_seq_len": LONGEST + 4,
        } | drawn
        self.runner_arguments = (num_slots, seed)
        self.engine: Engine = make_engine(self.new_runner(num_slots, seed), **self.options)
        self.num_shortages = 0  # of memory, that are still to come
        self.short_place: Place = "logits"
        short_of_memory(self.engine, self.is_short)
        self.programs: list[Program] = []
        self.promises: list[Promise] = []  # that no run was told of
        self.keepers: list[EngineSession] = []  # runs without nodes, of a trunk
        for _ in range(self.random.randint(1, 5)):
            self.submit(self.random.randint(1, 6), 1, self.random.random() < 0.5)

    # ---- programs come and grow

    def op(self, program: Program) -> tuple[Op, int]:
        """A text, a gen or a select, and the most tokens that it adds to its row."""
        kind = self.random.random()
        gens = [n.id for n in program.nodes if isinstance(n.op, Gen)]
        if kind < 0.2:
            text = self.random.choice(TEXTS)
            return Text((text,)), len(text)
        if kind < 0.3 and gens:
            gen = self.random.choice(gens)
            return Text(("<", Ref(gen), ">")), 2 + 3 * MOST_NEW
        if kind < 0.45:
            choices = self.random.choice(CHOICES)
            return Select(f"s{len(program.nodes)}", choices), sum(map(len, choices))
        sampling = SamplingParams(
            max_tokens=self.random.randint(1, MOST_NEW),
            prompt_logprobs=self.random.random() < 0.2,
            ignore_eos=self.random.random() < 0.7,
            temperature=0.0 if self.greedy else self.random.choice([0.0, 0.0, 0.0, 1.0]),
            top_logprobs=2 if self.greedy else 0,
            stop=self.random.choice([(), (), (), ("a",), ("b", "ab")]),
        )
        return Gen(f"g{len(program.nodes)}", sampling), 2 + sampling.max_tokens

    def append(self, program: Program, op: Op, parent: int | None, size: int = 0) -> int:
        node = len(program.nodes)
        program.nodes.append(GraphNode(node, str(node), op, parent))
        program.lengths[node] = program.lengths[parent] + size
        return node

    def grow(self, program: Program, parent: int | None, num: int) -> int | None:
        for _ in range(num):
            op, size = self.op(program)
            if program.lengths[parent] + size <= LONGEST:
                parent = self.append(program, op, parent, size)
        return parent

    def send(self, program: Program) -> None:
        piece = tuple(program.nodes[program.num_sent :])
        if piece:
            program.session.extend(RequestGraph(piece, base=program.num_sent))
            program.num_sent += len(piece)

    @precondition(lambda self: len(self.programs) < 12)
    @rule(num=st.integers(1, 6), times_out=st.integers(0, 15), closes=st.booleans())
    def submit(self, num: int, times_out: int, closes: bool) -> None:
        options = RunOptions(
            seed=7,
            row=len(self.programs),
            priority=self.random.randint(0, 2),
            timeout=1e-6 if times_out == 0 else None,
            trunk=self.trunk(),  # told wrongly at times, which changes nothing
        )
        collector = Collector()
        program = Program(self.engine.open(options, collector), collector, options)
        program.was_stopped = times_out == 0
        self.programs.append(program)
        stem = self.random.choice(STEMS)
        program.tip = self.append(program, Text((stem,)), None, len(stem))
        program.tip = self.grow(program, program.tip, num)
        self.send(program)
        if closes:
            self.close_program(program)

    def trunk(self) -> RequestGraph | None:
        text = self.random.choice(TRUNKS)
        return None if text is None else RequestGraph((GraphNode(0, "0", Text((text,))),))

    @precondition(lambda self: len(self.keepers) < 4)
    @rule(priority=st.integers(0, 2))
    def keep_trunk(self, priority: int) -> None:
        options = RunOptions(priority=priority, trunk=self.trunk())
        self.keepers.append(self.engine.open(options, Collector()))

    @precondition(lambda self: self.keepers)
    @rule(which=st.integers(0), cancels=st.booleans())
    def drop_trunk(self, which: int, cancels: bool) -> None:
        keeper = self.keepers.pop(which % len(self.keepers))
        if cancels:
            keeper.cancel()
        keeper.close()

    def open_program(self, which: int) -> Program | None:
        left = [program for program in self.programs if not program.is_closed]
        return left[which % len(left)] if left else None

    @rule(which=st.integers(0), num=st.integers(1, 5))
    def extend(self, which: int, num: int) -> None:
        if (program := self.open_program(which)) is not None:
            program.tip = self.grow(program, program.tip, num)
            self.send(program)

    @rule(which=st.integers(0), width=st.integers(1, 4), joins=st.booleans())
    def fork(self, which: int, width: int, joins: bool) -> None:
        program = self.open_program(which)
        if program is None:
            return
        gang, tip = f"fork{len(program.nodes)}", program.tip
        meets = joins and self.random.random() < 0.7
        heads = [
            self.append(program, Branch(i, width, gang, meets=meets), tip) for i in range(width)
        ]
        ends = [self.grow(program, head, self.random.randint(1, 3)) for head in heads]
        if joins:
            branches = tuple(end for end in ends if end is not None)
            policies: list[JoinPolicy] = ["all", "collect"]
            program.tip = self.append(program, Join(branches, self.random.choice(policies)), tip)
        self.send(program)

    @rule(which=st.integers(0))
    def close(self, which: int) -> None:
        if (program := self.open_program(which)) is not None:
            self.close_program(program)

    def close_program(self, program: Program) -> None:
        program.session.close()
        program.is_closed = True

    # ---- time passes, and things go wrong

    @rule(num=st.integers(1, 12))
    def step(self, num: int) -> None:
        for _ in range(num):  # each checks the accounting
            self.engine.step()

    @precondition(lambda self: self.programs)
    @rule(which=st.integers(0), node=st.none() | st.integers(0, 20))
    def cancel(self, which: int, node: int | None) -> None:
        program = self.programs[which % len(self.programs)]
        program.was_stopped = True
        program.session.cancel(None if node is None else [node % len(program.nodes)])

    @rule(which=st.integers(0), whole=st.booleans())
    def retract(self, which: int, whole: bool) -> None:
        running = list(self.engine.core.scheduler._running.values())
        if running:
            request = running[which % len(running)]
            if whole:
                self.engine.core.scheduler.retract_program(request.program_id)
            else:
                self.engine.core.scheduler.retract(request)
            self.engine.core.scheduler.check()

    @rule(num=st.integers(1, 6), place=st.sampled_from(PLACES))
    def run_out_of_memory(self, num: int, place: Place) -> None:
        self.num_shortages, self.short_place = num, place

    def is_short(self, place: Place, logits: Tensor) -> bool:
        if self.num_shortages == 0 or place != self.short_place:
            return False
        if len(logits) == 1:  # who does not fit alone would fail
            return False
        self.num_shortages -= 1
        return True

    @rule(which=st.integers(0), num=st.integers(0, 20))
    def promise(self, which: int, num: int) -> None:
        rows = [request.token_ids for request in self.engine.core.scheduler._running.values()]
        if rows and not self.promises:
            self.promises.append(self.engine.core.holds.promise(rows[which % len(rows)][: num + 1]))

    # ---- what holds in the end

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for program in self.programs:
            if not program.is_closed:
                self.close_program(program)
        for keeper in self.keepers:
            keeper.close()
        num_nodes = sum(len(program.nodes) for program in self.programs)
        drive(self.engine, max_steps=200 + 400 * num_nodes)
        for program in self.programs:
            assert program.collector.num_ended == len(program.nodes), "a node has no end"
        check_idle(self.engine)
        assert not self.engine.core.holds._programs, "a program that is over holds something"
        assert not self.engine.core.holds._gaps
        assert not self.engine.core.holds._away
        for promise in self.promises:
            self.engine.core.holds.unpromise(promise)
        assert not self.engine.core.holds._promises, "a promise outlives its runs"
        self.engine.reset_cache()
        assert self.engine.core.cache.num_nodes == 0
        self.compare()

    def compare(self) -> None:
        """Run what nobody stopped again, without a cache, and expect the same."""
        runner = self.new_runner(4096, self.runner_arguments[1])
        fresh = make_engine(runner, prefix_cache=False, check_accounting=False)
        for program in self.programs:
            if not program.was_stopped:
                alone = Collector()
                session = fresh.open(program.options, alone)
                session.extend(RequestGraph(tuple(program.nodes)))
                session.close()
                drive(fresh)
                assert not program.collector.errors
                self.equal(program, alone)

    def equal(self, program: Program, alone: Collector) -> None:
        assert program.collector.outcome() == alone.outcome()


class TinyModelMachine(EngineMachine):
    """On a model of two layers: equal but where the model itself was undecided."""

    greedy = True

    def new_runner(self, num_slots: int, seed: int) -> Runner:
        return tiny_runner(num_slots)

    def equal(self, program: Program, alone: Collector) -> None:
        assert_same_outcome(RequestGraph(tuple(program.nodes)), program.collector, alone)


def _settings(examples: dict[str, int]) -> settings:
    profile = settings.get_current_profile_name()
    return settings(
        max_examples=examples[profile],
        stateful_step_count=20,
        phases=[Phase.generate, Phase.shrink],
    )


TestEngineOnHashLogits = EngineMachine.TestCase
TestEngineOnHashLogits.settings = _settings(MANY)
TestEngineOnATinyModel = TinyModelMachine.TestCase
TestEngineOnATinyModel.settings = _settings(FEW)
