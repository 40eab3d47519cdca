"""The KV cache: which slots are free, which prefixes they hold, and (kv_pool) the tensors."""

from .page_allocator import PageAllocator
from .radix_cache import InsertResult, PrefixMatch, PrefixProbe, RadixCache, RadixNode

# KVPool needs torch: import it from .kv_pool, so that the scheduler can be used without.
__all__ = [
    "InsertResult",
    "PageAllocator",
    "PrefixMatch",
    "PrefixProbe",
    "RadixCache",
    "RadixNode",
]
