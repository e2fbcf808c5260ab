"""One precision flow (Jet-RL): block linears FP8 in training's forward, its gradients and the rollout alike."""

from jetgraph.policy import BLOCK_LINEARS, FP8Recipe, Policy, Rule

POLICY = Policy(
    name="jet",
    description="FP8 e4m3, activations and gradients 1x128, weights 128x128, in training and rollout",
    train=(Rule("lm_head", None, optional=True), Rule(BLOCK_LINEARS, FP8Recipe())),
)
