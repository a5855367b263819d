"""Pushes the trainer's weights to the engines. `pusher.py` opens and closes a push on every engine; one of three
transports (`distributed.py`, `tensor.py`, `disk.py`) carries the weights."""
