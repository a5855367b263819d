"""Rollout benchmark: the same rounds under each variant, compared in the steady state.

``python -m bench.rollout --preset cpu --budget-minutes 60`` starts a stock and a patched SGLang server with the same
flags, alternates between the variants and appends rows to ``bench/results/rollout.json``.

- ``lengths.py``        distributions of response lengths, and the distance of a sample from one
- ``presets.py``        sizes, and the order of the cells
- ``workload.py``       the stream of prompts, the same for every variant
- ``servers.py``        starts the stock and the patched server
- ``engine_client.py``  HTTP client and the scheduler's counters
- ``variant.py``        interface of a variant, and the result of a round
- ``baselines.py``      synchronous and client-side APRIL on stock SGLang
- ``in_flight.py``      SGLang's pause, and an asynchronous client
- ``april.py``          the batch quota
- ``steady_state.py``   when measuring may begin
- ``metrics.py``        rounds to rows; the identity generated = delivered + Δcarry + wasted
- ``limit.py``          decode rate of the full batch; ``../step_costs.py``: other step costs
- ``testbed.py``        servers, checkpoints, and probes of the machine between the rounds
- ``interleaving.py``   which cells alternate, and how
- ``runner.py``         cells, repetitions, the time budget
"""
