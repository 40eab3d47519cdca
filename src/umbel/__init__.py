"""umbel: a structured-generation language and the LLM runtime that serves it."""

__version__ = "0.1.0"
