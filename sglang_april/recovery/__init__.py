"""Recovery after a crash: the journal, its schema, what is read back from it, and KV pages found on disk."""
