"""An RL training loop around sglang-april: rollouts and rewards, Megatron-core as trainer, weight pushes."""
