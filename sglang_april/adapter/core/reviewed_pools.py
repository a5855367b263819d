"""The review of SGLang's KV pools, by class name (`whole-pages`); `supported_pools.py` has the classes themselves."""

SUPPORTED_POOLS = ("MHATokenToKVPool", "MLATokenToKVPool")
"""Supported pools: a partial's pages hold everything that these store per token."""

REFUSED_POOLS: dict[str, str] = {
    "DSATokenToKVPool": "it keeps index keys and their scales beside the latent KV",
    "DeepSeekV4IndexerPool": "it is one of several pools of a model",
    "DeepSeekV4SingleKVPool": "it is one of several pools of a model",
    "DeepSeekV4TokenToKVPool": "it keeps compressed KV and compressor state beside a sliding window",
    "HiSparseC4DevicePool": "its KV is spread over the device and the host",
    "HiSparseDSATokenToKVPool": "its KV is spread over the device and the host",
    "HybridLinearKVPool": "it keeps recurrent state per request beside the KV",
    "LayerSplitDSATokenToKVPool": "it spreads the layers over ranks",
    "MHATokenToKOnlyPool": "it is one of several pools of a model",
    "MHATokenToKVPoolFP4": "it keeps scales beside the KV",
    "MHATokenToKVPoolMXFP8": "it keeps scales beside the KV",
    "MLATokenToKVPoolFP4": "it keeps scales beside the latent KV",
    "MiniMaxSparseKVPool": "it keeps index keys beside the KV",
    "NoOpMHATokenToKVPool": "it keeps no KV",
    "PageMajorMHATokenToKVPool": "the page store reads layer-major pools only",
    "SWAKVPool": "it has a second pool for the sliding window",
    "UnifiedHybridLinearKVPool": "it keeps recurrent state per request beside the KV",
    "UnifiedMHATokenToKVPool": "it shares one buffer with other pools",
    "UnifiedMLATokenToKVPool": "it shares one buffer with other pools",
    "UnifiedSWAKVPool": "it has a second pool for the sliding window",
}
"""Reviewed and refused, by class name: why. Any class that is not listed is refused as unreviewed."""
