"""A multi-turn agent for `april-train`: it adds a list of numbers with a calculator, one call per turn.

- ``calculator.py``        the task, the tool, and the agent function (`agent: examples.agent.calculator:agent`)
- ``train_checkpoint.py``  makes ``examples/checkpoints/calculator``, the tiny model that training starts from
"""
