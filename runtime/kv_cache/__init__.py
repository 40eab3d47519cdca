"""The KV cache: which pages are free, which prefixes they hold, and (kv_pool) the tensors."""

from .holds import Holds, Promise
from .page_allocator import PageAllocator
from .pages import pages_of, slots_of
from .radix_cache import RadixCache
from .radix_node import (
    InsertResult,
    Mark,
    NodeClass,
    PageKey,
    PrefixMatch,
    PrefixProbe,
    RadixNode,
    page_key,
)
from .reclaim_order import EVICTION_POLICIES

# KVPool needs torch: import it from .kv_pool, so that the scheduler can be used without.
__all__ = [
    "EVICTION_POLICIES",
    "Holds",
    "InsertResult",
    "Mark",
    "NodeClass",
    "PageAllocator",
    "PageKey",
    "PrefixMatch",
    "PrefixProbe",
    "Promise",
    "RadixCache",
    "RadixNode",
    "page_key",
    "pages_of",
    "slots_of",
]
