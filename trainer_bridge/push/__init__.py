"""Step 8 of 9 (push): the trainer's weights into the engines. `pusher` opens and closes a push on all of them;
between, one of three ways carries the weights: `distributed`, `tensor` or `disk`."""
