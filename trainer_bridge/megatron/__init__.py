"""Step 7 of 9 (train): the policy in Megatron-core. `shapes` → `model`, filled through `mapping` by `weights`; `policy`
is one rank of the trainer, `team` all of them."""
