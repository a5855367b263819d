"""Rollouts of other people's trainers over batch-quota rounds. Nothing here imports SGLang or a trainer at import."""
