"""The bridge from rollout replies to a trainer, and from the trainer's weights back to the engines."""
