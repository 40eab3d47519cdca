"""What the tests of SGLang's names share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import umbel.interpreter.compat.sglang as sgl


def run(body: Callable[[sgl.ProgramState], Any], **options: Any) -> sgl.ProgramState:
    state: sgl.ProgramState = sgl.function(body).run(**options)
    return state
