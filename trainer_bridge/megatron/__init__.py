"""The trainer in Megatron-core: `shapes.py` describes a model, `model.py` builds it, and `weights.py` fills it through
`mapping.py`. `policy.py` is one rank, `worker_group.py` all of them."""
