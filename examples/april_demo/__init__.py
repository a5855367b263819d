"""The demo: rounds of rollouts three ways, and reinforcement learning two ways, on real servers.

``python -m examples.april_demo`` starts two servers and runs three variants of ``bench.rollout`` in turn on the first.
Then it trains the tiny model waiting for all and with a batch quota, one step of each in turn, on a server each. It
writes two tables, ``out/demo/summary.json``, ``out/demo/running_batch.png`` and ``out/demo/learning.png``.

- ``settings.py``  what is run: slots, groups, rounds, lengths
- ``server.py``    starts the servers, and ends them in every case
- ``rounds.py``    takes turns between the variants and computes their metrics
- ``training.py``  the two training runs, through the trainer bridge, and their metrics
- ``report.py``    tables, summary and plots
"""
