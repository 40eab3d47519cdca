"""The real small model, held to transformers on the same dequantised weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.runtime.models.tiny_models import CPU, load, make_gguf_oracle, oracle_logits

from umbel.runtime import model_store
from umbel.runtime.kv_cache.kv_pool import KVPool
from umbel.runtime.model_runner.inputs import build_inputs
from umbel.runtime.models import CausalLM, ForwardBatch
from umbel.runtime.request import Request
from umbel.runtime.scheduler.batch import Batch, ScheduledRequest
from umbel.runtime.tokenizer import Tokenizer

NUM_TOKENS = 64
MARGIN = 1e-4  # between the two best logits; below it either may win (rule 16)

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "Q: What is 12 times 12?\nA:",
    "Dear Sir or Madam,\n\nI am writing to",
    "The three laws of thermodynamics are",
    "SELECT name, price FROM",
    "To make a good cup of tea,",
    "In 1969, the first humans",
    "Water boils at a temperature of",
    '{"name": "Ada", "age": 36, "languages": [',
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    "Photosynthesis is the process by which",
    "Roses are red, violets are blue,",
    "import numpy as np\n\nx = np.",
    "My printer is offline and I can't print. Please",
    "Newton's second law says that",
    "Für Elise is a piece by",
    "1, 1, 2, 3, 5, 8, 13,",
    "The opposite of hot is",
)


def generate_greedily(model: CausalLM, prompts: list[list[int]]) -> list[torch.Tensor]:
    """Decode all prompts in one batch; return each one's logits, [NUM_TOKENS, vocab_size].

    The prompts' ids grow by what was generated. Slots lie in random order over the pool.
    """
    lengths = [len(ids) + NUM_TOKENS for ids in prompts]
    slots = np.random.default_rng(0).permutation(sum(lengths)).tolist()
    rows = [Request(0, 0, 0, ids, limit=n) for ids, n in zip(prompts, lengths, strict=True)]
    for row, length in zip(rows, lengths, strict=True):
        row.slots.extend(slots.pop() for _ in range(length))
    shape = model.config
    pool = KVPool(
        shape.num_layers, sum(lengths), shape.num_kv_heads, shape.head_dim, torch.float32, CPU
    )
    steps: list[torch.Tensor] = []
    starts = [0] * len(rows)
    for _ in range(NUM_TOKENS):
        pieces = [
            ScheduledRequest(row, start, len(row.token_ids))
            for row, start in zip(rows, starts, strict=True)
        ]
        ends = np.cumsum([piece.num_tokens for piece in pieces])
        inputs = build_inputs(Batch(tuple(pieces), 0), (ends - 1).tolist())
        logits = model.forward(ForwardBatch.from_inputs(inputs, CPU), pool)
        starts = [len(row.token_ids) for row in rows]
        for row, token_id in zip(rows, logits.argmax(-1).tolist(), strict=True):
            row.token_ids.append(token_id)
        steps.append(logits)
    return list(torch.stack(steps, 1))


@pytest.mark.slow
def test_greedy_ids_equal_transformers() -> None:
    path = model_store.pull("smollm2")
    tokenizer = Tokenizer.from_model(model_store.resolve("smollm2"))
    rows = [tokenizer.encode_text(text) for text in PROMPTS]
    starts = [len(ids) for ids in rows]
    found = generate_greedily(load(path), rows)

    oracle = make_gguf_oracle(path)
    for ids, start, logits in zip(rows, starts, found, strict=True):
        # Teacher-forced on our ids: where each of them is transformers' best, so is the sequence.
        expected = oracle_logits(oracle, ids[:-1])[start - 1 :]
        torch.testing.assert_close(logits, expected, atol=2e-3, rtol=0)
        best = expected.topk(2)
        is_decided = best.values[:, 0] - best.values[:, 1] >= MARGIN
        generated = torch.tensor(ids[start:])
        assert len(generated) == NUM_TOKENS
        assert torch.equal(generated[is_decided], best.indices[is_decided, 0])
