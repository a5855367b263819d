"""The demo: rounds of rollouts three ways, and reinforcement learning two ways, on one real server.

``python -m examples.april_demo`` starts the server, runs the variants of ``variants.py`` in turn, round by round, then
trains the tiny model waiting for all and with ours, and ends with two tables, ``out/demo/summary.json``,
``out/demo/running_batch.png`` and ``out/demo/learning.png``.

- ``settings.py``  what is run: slots, groups, rounds, lengths
- ``server.py``    starts the server and ends it, whatever happens
- ``engine.py``    the routes that the variants use, and a watch on the engine's own counters
- ``variants.py``  the three ways to run a round, behind one small interface
- ``measure.py``   runs a variant's rounds and turns them into figures
- ``training.py``  the two training runs, through the trainer bridge, and their figures
- ``report.py``    tables, summary and plots
"""
