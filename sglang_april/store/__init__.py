"""Step 5: where partials and their KV pages are kept."""
