"""The demo: the same rounds with weight updates between them, three ways, on the real server.

``python -m examples.april_demo`` starts the server, runs the variants of ``variants.py`` in turn, round by round, and
ends with a table, ``out/demo/summary.json`` and ``out/demo/running_batch.png``.

- ``settings.py``  what is run: slots, groups, rounds, lengths
- ``server.py``    starts the server and ends it, whatever happens
- ``engine.py``    the routes that the variants use, and a watch on the engine's own counters
- ``variants.py``  the three ways to run a round, behind one small interface
- ``measure.py``   runs a variant's rounds and turns them into figures
- ``report.py``    table, summary and plot
"""
