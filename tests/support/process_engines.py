"""Engines on hash logits for a process of their own: what its factory makes, by import path."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from typing import Any

from tests.support.engine_harness import GRAMMAR, TOKENIZER, make_runner

from umbel.lang.errors import ModelLoadError
from umbel.runtime.config import EngineConfig
from umbel.runtime.engine import Engine

HERE = "tests.support.process_engines"
HASH = f"{HERE}:hash_engine"
BROKEN = f"{HERE}:broken"
CRASHING = f"{HERE}:crashing"


def hash_engine(
    *,
    pause_s: float = 0.0,
    stop_at_pass: int = -1,
    hang_at_pass: int = -1,
    num_slots: int = 768,
    **options: Any,
) -> Engine:
    """A started engine whose passes take `pause_s`; at a pass it may stop itself or hang."""
    num_passes = 0

    def poison(prefix: Sequence[int]) -> bool:
        nonlocal num_passes
        num_passes += 1
        time.sleep(pause_s)
        if num_passes == stop_at_pass:
            raise SystemExit("as asked")
        if num_passes == hang_at_pass:
            time.sleep(3600)
        return False

    is_plain = not pause_s and stop_at_pass < 0 and hang_at_pass < 0
    runner = make_runner(num_slots, poison=None if is_plain else poison)
    fields: dict[str, Any] = {"max_running": 8, "max_step_tokens": 64}
    config = EngineConfig(**(fields | options))
    return Engine(runner, TOKENIZER, config, max_seq_len=512, model_name="hash", grammar=GRAMMAR)


def broken(known: bool) -> Engine:
    """A factory that raises."""
    if known:
        raise ModelLoadError("there are no weights")
    raise ZeroDivisionError("what is this")


def crashing() -> Engine:
    """A factory whose process dies."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")
