"""An engine of plain tensors: merged q|k|v and gate|up, a tied and padded embedding, biases and norms."""

from __future__ import annotations

import torch
from torch import Tensor

from jetgraph.policy import Policy, get_policy
from jetgraph.sync import Receiver, Slot

PADDED = 512
LAYER = "model.layers.0"
MERGED = (
    [f"{LAYER}.self_attn.{leaf}" for leaf in ("q_proj", "k_proj", "v_proj")],
    [f"{LAYER}.self_attn.o_proj"],
    [f"{LAYER}.mlp.{leaf}" for leaf in ("gate_proj", "up_proj")],
    [f"{LAYER}.mlp.down_proj"],
)


class FakeEngine:
    """A `jetgraph.sync.WeightStore` of one layer, in the layout of real engines.

    ``served`` is what it would compute with: derived from the weights by `refresh`, as packed or widened weights are.
    """

    def __init__(self, model: torch.nn.Module, policy: str | Policy) -> None:
        self.slots: dict[str, Slot] = {}
        self.aliases = {"lm_head.weight": "model.embed_tokens.weight"}
        self.rest = {"rotary": torch.arange(64.0), "k_scale": torch.tensor(1.5)}
        self.num_stops = 0
        self.stop_error: Exception | None = None
        masters = dict(model.named_parameters())
        embedding = masters["model.embed_tokens.weight"]
        padded = torch.zeros(PADDED, embedding.shape[1], dtype=torch.bfloat16)
        self._add("model.embed_tokens.weight", padded[: embedding.shape[0]], "bf16")
        precision = str(get_policy(policy).linear(MERGED[1][0], rollout=True).weight)
        for names in MERGED:
            self._add_merged({name: masters[f"{name}.weight"].shape for name in names}, precision)
        for name, master in masters.items():
            if name not in self.slots:
                self._add(name, torch.zeros(master.shape, dtype=torch.bfloat16), "bf16")
        self.refresh()

    def _add_merged(self, shapes: dict[str, torch.Size], precision: str) -> None:
        cols = next(iter(shapes.values()))[1]
        codes = torch.zeros(sum(s[0] for s in shapes.values()), cols, dtype=torch.float8_e4m3fn)
        scales = torch.full((sum(-(-s[0] // 128) for s in shapes.values()), -(-cols // 128)), torch.nan)
        row = scale_row = 0
        for name, (num_rows, _) in shapes.items():
            num_scales = -(-num_rows // 128)
            self._add(f"{name}.weight", codes[row : row + num_rows], precision)
            self._add(f"{name}.weight_scale_inv", scales[scale_row : scale_row + num_scales], "f32")
            row, scale_row = row + num_rows, scale_row + num_scales

    def _add(self, name: str, live: Tensor, precision: str) -> None:
        self.slots[name] = Slot(name, live, precision)

    def stop(self) -> None:
        self.num_stops += 1
        if self.stop_error is not None:
            raise self.stop_error

    def refresh(self) -> None:
        self.served = {name: slot.live.float().clone() for name, slot in self.slots.items()}

    def live_bytes(self) -> dict[str, bytes]:
        return {name: raw(slot.live) for name, slot in self.slots.items()}

    def weight(self, linear: str) -> Tensor:
        """FP32 [N, K]: what the engine multiplies by, from what it derived."""
        codes, scale = self.served[f"{linear}.weight"], self.served[f"{linear}.weight_scale_inv"]
        rows = scale.repeat_interleave(128, 0)[: codes.shape[0]]
        return codes * rows.repeat_interleave(128, 1)[:, : codes.shape[1]]


def raw(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def connected(model: torch.nn.Module, policy: str | Policy = "jet") -> tuple[FakeEngine, Receiver]:
    engine = FakeEngine(model, policy)
    return engine, Receiver(engine)
