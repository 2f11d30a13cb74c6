"""The longest-suffix-match drafter: copy what followed the last occurrence of the longest repeated suffix."""

from numba import njit

MAX_MATCH = 32
"""Context matches are measured up to so many tokens, in imported and in recorded traces."""


@njit(cache=True, nogil=True)
def longest_suffix(tokens, first, max_match, kmax, match, drafted, accepted):
    """Drafts at every output position of one request.

    Args:
        tokens: (N,) int32 prompt and output token ids.
        first: Number of prompt tokens; output position p = 1..N-first-1 drafts after ``tokens[:first + p]``.
        max_match: Longest suffix looked for, in tokens.
        kmax: Longest draft.
        match: (N-first-1,) uint8 out: length of the suffix found, the longest; 0 none.
        drafted: (N-first-1,) uint8 out: tokens from its most recent earlier occurrence to the end of the context, at most kmax.
        accepted: (N-first-1,) uint8 out: how many of them the output continues with.
    """
    total = tokens.shape[0]
    for p in range(1, total - first):
        end = first + p
        longest = 0
        source = 0
        for j in range(end - 1, 0, -1):
            if tokens[j - 1] != tokens[end - 1]:
                continue
            length = 1
            while length < max_match and length < j and tokens[j - 1 - length] == tokens[end - 1 - length]:
                length += 1
            if length > longest:
                longest = length
                source = j
                if length == max_match:
                    break
        count = min(kmax, end - source) if longest else 0
        agree = 0
        while agree < count and end + agree < total and tokens[source + agree] == tokens[end + agree]:
            agree += 1
        match[p - 1] = longest
        drafted[p - 1] = count
        accepted[p - 1] = agree


@njit(cache=True, nogil=True)
def repeated_trigrams(tokens):
    """Share of the tokens (N,) that end a 3-gram seen before in them; 0.0 for fewer than four tokens."""
    total = tokens.shape[0]
    seen = 0
    for i in range(3, total):
        for j in range(2, i):
            if tokens[j] == tokens[i] and tokens[j - 1] == tokens[i - 1] and tokens[j - 2] == tokens[i - 2]:
                seen += 1
                break
    return seen / total if total > 3 else 0.0
