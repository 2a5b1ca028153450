"""Random numbers that depend on names, not on order.

Every response has a seed, and its token at position i draws one uniform that is a function of (seed, i) alone. So the
same distributions give the same tokens, whichever other responses share the batch, whichever slot the response sits in,
and however often it was parked. The function is SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom
number generators", 2014) read at random access, with k the golden-ratio increment, modulo 2^64:

    mix(z):   z ^= z >> 30;  z *= 0xBF58476D1CE4E5B9;  z ^= z >> 27;  z *= 0x94D049BB133111EB;  z ^= z >> 31
    bits(seed, i)    = mix(mix(seed) + (i + 1) k)           the i-th output of a stream started at mix(seed)
    uniform(seed, i) = (bits >> 12) / 2^52                  in [0, 1 - 2^-52]

It is a good mixer, not a cryptographic one.
"""

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_WORD = 2**64 - 1


def mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser: a bijection of 64-bit words; every input bit moves about half of the output bits."""
    words = (words ^ (words >> np.uint64(30))) * _FIRST
    words = (words ^ (words >> np.uint64(27))) * _SECOND
    return words ^ (words >> np.uint64(31))


def stream(seed: int) -> np.uint64:
    """Where the stream of this seed starts. Any Python integer is a valid seed and is taken modulo 2^64."""
    return np.uint64(mix(np.array([seed & _WORD], dtype=np.uint64))[0])


def uniforms(streams: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """The uniform in [0, 1) at each position of each stream; the two arrays broadcast."""
    bits = mix(streams + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(12)).astype(np.float64) * 2.0**-52


def response_seed(seed: int, group: int, index: int) -> int:
    """Seed of response `index` of group `group` in the run with this seed: a hash of the three, in [0, 2^63).

    h <- mix(h + k + value) for value in (seed, group, index), from h = 0; the seed is h >> 1
    """
    state = 0
    for value in (seed, group, index):
        state = int(stream(state + int(_GOLDEN) + value))
    return state >> 1
