"""Rollout benchmarks: rounds under every way to run them, side by side, in the steady state.

``python -m bench.rollout --preset cpu --budget-minutes 60`` starts a stock and a patched SGLang server with the same
flags, runs the variants' repetitions in turn and appends rows to ``bench/results/rollout.json``.

- ``lengths.py``   response lengths: the distributions, and how far a sample is from one
- ``presets.py``   sizes, and what is run in which order
- ``workload.py``  the stream of prompts: the same for every variant
- ``servers.py``   starts the two servers
- ``engine.py``    the routes, and the scheduler's own counters
- ``variant.py``   what a variant is, and what a round returns
- ``stock.py``     synchronous, outside (and its forms), SGLang's own pause, asynchronous
- ``april.py``     ours
- ``steady.py``    when measuring may begin
- ``figures.py``   rounds to rows; the identity generated = delivered + Δcarry + wasted
- ``limit.py``     the full batch's decode rate; ``../step_costs.py``: what else a step costs
- ``bed.py``       the servers, and the looks at the machine between the rounds
- ``turns.py``     which cells are measured in turns, and how
- ``run.py``       cells, repetitions, the budget
"""
