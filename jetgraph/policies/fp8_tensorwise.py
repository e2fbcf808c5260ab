"""The recipe of the peers, for comparison: one dynamic scale a tensor for activations, weights and gradients.

The scale of an activation is that of all tokens in the call, so a token's result depends on its company: `jetgraph
verify` finds JG019 in any rollout of it, and the vLLM plugin refuses to serve it.  Gradients are e4m3 like the rest,
where torchao's and Transformer Engine's defaults give them e5m2.
"""

from jetgraph.policy import BLOCK_LINEARS, FP8Recipe, Policy, Rule
from jetgraph.precision import Division, ScaleRule

POLICY = Policy(
    name="fp8_tensorwise",
    description="FP8 e4m3, one dynamic scale a tensor (for comparison: its rollout is never contained, JG019)",
    train=(
        Rule("lm_head", None, optional=True),
        Rule(BLOCK_LINEARS, FP8Recipe(group=None, rule=ScaleRule(division=Division.RECIPROCAL_OF_AMAX))),
    ),
)
