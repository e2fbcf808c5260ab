"""No quantisation anywhere: the baseline."""

from jetgraph.policy import Policy, Rule

_RULES = (Rule("*", None),)

POLICY = Policy(name="bf16", description="BF16 in training and rollout", train=_RULES, rollout=_RULES)
