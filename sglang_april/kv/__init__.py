"""KV pages of suspended samples: the page store, its copiers and tiers, the page format and the cost model."""
