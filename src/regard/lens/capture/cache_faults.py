"""Find out why a call does not extend the cache that holds its keys."""

from __future__ import annotations

from regard.lens.capture.cache_joining import CacheFault, JoinedCalls
from regard.lens.capture.call import Call

# A call that extends no cache is compared with this many of the latest ones to find out why.
MAX_FAULTY_CACHES = 8


def find_cache_fault(groups: list[JoinedCalls], call: Call, number: int) -> CacheFault | None:
    """Find out which of the latest caches a call does not extend although it holds its keys.

    Args:
        groups: The calls of the layer; those of one cache are joined.
        call: A call that extends none of them.
        number: Its number among the calls of its layer.

    Returns:
        The fault; None if the call is of another cache, or of none.
    """
    for joined in reversed(groups[-MAX_FAULTY_CACHES:]):
        found = joined.find_fault(call)
        if found is not None:
            return CacheFault(number, found[0], int(call.query.shape[-2]), found[1])
    return None
