"""The scheduler side: decisions that every TP rank makes alike."""
