"""The negative control: what people run today.  Training is BF16, the rollout is FP8, and the two policies differ."""

from jetgraph.policies.bf16 import POLICY as BF16_POLICY
from jetgraph.policies.jet import POLICY as JET_POLICY
from jetgraph.policy import Policy

POLICY = Policy(
    name="bf16_train_fp8_rollout",
    description="BF16 training, FP8 rollout (negative control)",
    train=BF16_POLICY.train,
    rollout=JET_POLICY.rollout,
)
