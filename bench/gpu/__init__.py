"""All checks and benchmarks that need a GPU, by one command: ``make gpu``.

- ``pieces.py``   the pieces: commands on a GPU, and the same commands at their smallest on the CPU platform
- ``machine.py``  the first piece: what the machine has, and whether SGLang is the reviewed one
- ``page.py``     the page at the end: what passed, and which cells of README it fills
"""
