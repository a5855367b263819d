"""The review of SGLang's KV pools, by class name (`whole-pages`); `supported_pools.py` has the classes themselves."""

SUPPORTED_POOLS = ("MHATokenToKVPool", "MLATokenToKVPool")
"""Supported pools: a partial's pages hold everything that these store per token."""

REFUSED_POOLS: dict[str, str] = {
    "DSATokenToKVPool": "it keeps index keys and their scales beside the latent KV",
    "DeepSeekV4IndexerPool": "it is one of several pools of a model",
    "DeepSeekV4SingleKVPool": "it is one of several pools of a model",
    "DeepSeekV4TokenToKVPool": "it keeps compressed KV and compressor state beside a sliding window",
    "DeepSeekV4UniformFP8KVPool": "it is one of several pools of a model",
    "HiSparseC4DevicePool": "its KV is spread over the device and the host",
    "HiSparseDSATokenToKVPool": "its KV is spread over the device and the host",
    "HiSparseMHAMainPool": "its KV is spread over the device and the host",
    "HybridLinearKVPool": "it keeps recurrent state per request beside the KV",
    "LayerSplitDSATokenToKVPool": "it spreads the layers over ranks",
    "MHATokenToKOnlyPool": "it is one of several pools of a model",
    "MHATokenToKVPoolFP4": "it keeps scales beside the KV",
    "MHATokenToKVPoolMXFP8": "it keeps scales beside the KV",
    "MLATokenToKVPoolFP4": "it keeps scales beside the latent KV",
    "MiniMaxM3Nvfp4IndexKPool": "it is one of several pools of a model",
    "MiniMaxM3Nvfp4KVPool": "it keeps scales and index keys beside the KV",
    "MiniMaxM3Nvfp4MainKVPool": "it is one of several pools of a model",
    "MiniMaxSparseKVPool": "it keeps index keys beside the KV",
    "NoOpMHATokenToKVPool": "it keeps no KV",
    "PageInterleaveDSATokenToKVPool": "it spreads the pages over ranks",
    "PageInterleaveMHATokenToKVPool": "it spreads the pages over ranks",
    "PageInterleaveMLATokenToKVPool": "it spreads the pages over ranks",
    "PageMajorMHATokenToKVPool": "the page store reads layer-major pools only",
    "QSATokenToKVPool": "it keeps index keys and recurrent state beside the KV",
    "SWAKVPool": "it has a second pool for the sliding window",
    "UnifiedDraftKVPool": "it holds the KV of a draft model",
    "UnifiedDraftSWAKVPool": "it holds the KV of a draft model",
    "UnifiedHybridLinearKVPool": "it keeps recurrent state per request beside the KV",
    "UnifiedMHATokenToKVPool": "it shares one buffer with other pools",
    "UnifiedMLATokenToKVPool": "it shares one buffer with other pools",
    "UnifiedSWAKVPool": "it has a second pool for the sliding window",
}
"""Reviewed and refused, by class name: why. Any class that is not listed is refused as unreviewed."""
