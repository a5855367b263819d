"""Rules that depend on the policy version: pushes and staleness."""
