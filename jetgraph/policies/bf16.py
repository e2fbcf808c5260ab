"""No quantisation anywhere: the baseline."""

from jetgraph.policy import Policy, Rule

POLICY = Policy(name="bf16", description="BF16 in training and rollout", train=(Rule("*", None),))
