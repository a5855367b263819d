"""The demo: rounds of rollouts three ways, and reinforcement learning two ways, on one real server.

``python -m examples.april_demo`` starts the server, runs three variants of ``bench.rollout`` in turn, then
trains the tiny model waiting for all and with a batch quota. It writes two tables, ``out/demo/summary.json``,
``out/demo/running_batch.png`` and ``out/demo/learning.png``.

- ``settings.py``  what is run: slots, groups, rounds, lengths
- ``server.py``    starts the server, and ends it in every case
- ``rounds.py``    takes turns between the variants and computes their metrics
- ``training.py``  the two training runs, through the trainer bridge, and their metrics
- ``report.py``    tables, summary and plots
"""
