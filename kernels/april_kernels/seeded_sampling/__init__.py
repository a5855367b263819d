"""Sampling with a counter-based generator: the noise of a token depends on (seed, position, column) alone."""

from april_kernels.seeded_sampling.reference import keep_mask, murmur_hash32, seeded_sample

__all__ = ["keep_mask", "murmur_hash32", "seeded_sample"]
