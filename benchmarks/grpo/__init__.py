"""GRPO in one process: the parts of `benchmarks.rl`.

In the order of a step: `problems` gives prompts and rewards answers, `rollout` is the engine that samples them and
takes new weights, `actor` scores them and learns, `arm` is the loop of one arm in a process of its own, which goes on
from its `journal`.  `curves` makes rows and a picture of what the arms wrote.
"""
