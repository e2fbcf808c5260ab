"""`jet` with scales rounded up to powers of two (UE8M0), on both sides: codes are made with the scale that is kept.

The scales stay FP32 numbers, whose mantissa is zero; a kernel that wants their exponents alone packs them itself.
"""

from jetgraph.policy import BLOCK_LINEARS, FP8Recipe, Policy, Rule
from jetgraph.precision import ScaleRule

POLICY = Policy(
    name="jet_ue8m0",
    description="as jet, with power-of-two scales, rounded up, in training and rollout",
    train=(Rule("lm_head", None, optional=True), Rule(BLOCK_LINEARS, FP8Recipe(rule=ScaleRule(power_of_two=True)))),
)
