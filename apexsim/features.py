"""From what has happened in a request to what a policy sees of it: the same code in the simulator and on a live engine."""

from __future__ import annotations

import numpy as np

FEATURES = (
    "position_tokens",  # p: tokens emitted so far
    "context_tokens",  # prompt tokens + p
    "remaining_tokens",  # max_tokens - p; -1 where the limit is unknown
    "blocks",  # blocks run so far in this request
    "last_depth",  # requested depth of the last block; 0 before the first
    "last_drafted",  # tokens it submitted
    "last_accepted",  # tokens of them accepted
)


def observe(
    position: np.ndarray,
    prompt: np.ndarray,
    max_tokens: np.ndarray,
    blocks: np.ndarray,
    last: np.ndarray,
) -> np.ndarray:
    """Observations of n running requests.

    Args:
        position: (n,) p.
        prompt: (n,) prompt tokens.
        max_tokens: (n,) limits; 0 where unknown.
        blocks: (n,) blocks run so far.
        last: (n, 3) requested depth, drafted and accepted of the last block.

    Returns:
        (n, F) float64 in the order of ``FEATURES``; only the past and the request's own limits enter.
    """
    remaining = np.where(max_tokens > 0, max_tokens - position, -1)
    return np.column_stack((position, position + prompt, remaining, blocks, last)).astype(np.float64)
