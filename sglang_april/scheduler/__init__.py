"""Steps 2 to 4 and 9: what the scheduler process decides, on every rank alike."""
