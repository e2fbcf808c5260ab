"""What a checkpoint declares about its own precision.  No vLLM in here.

The declaration is the checkpoint's ``quantization_config``, written by `jetgraph.export`:

    {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
     "modules_to_not_convert": ["lm_head"],
     "jetgraph": {"policy": "jet", "ops": "exact", "activation": "<Precision>", "weight": "<Precision>",
                  "rules": {<the whole policy, Policy.to_plain>}}}

A checkpoint without FP8 weights (policy bf16) declares ``"quant_method": "jetgraph"`` and both precisions ``bf16``.
``ops: exact`` means the trainer's formulas everywhere; ``ops: stock`` keeps our linears and leaves vLLM's own norm,
rotary, activation, attention and head in place (a negative control).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jetgraph.precision import BF16, Format, Granularity, Precision

NAME = "jetgraph"
OPS = ("exact", "stock")


@dataclass(frozen=True)
class Declaration:
    """What a checkpoint says about itself; `parse` refuses what no method here can run."""

    policy: str
    ops: str
    activation: Precision
    weight: Precision
    unconverted: tuple[str, ...] = ()
    """Exact dotted paths of modules whose weights stay bf16."""

    @property
    def is_fp8(self) -> bool:
        return self.weight.format is Format.E4M3

    @classmethod
    def parse(cls, config: dict[str, Any]) -> Declaration:
        own = config.get(NAME)
        if own is None:
            raise ValueError(f"quantization_config has no {NAME!r} entry: export it with jetgraph.export")
        missing = [key for key in ("policy", "ops", "activation", "weight") if key not in own]
        if missing:
            raise ValueError(f"quantization_config[{NAME!r}] lacks {', '.join(missing)}: export the checkpoint again")
        if own["ops"] not in OPS:
            raise ValueError(
                f"quantization_config[{NAME!r}]['ops'] is {own['ops']!r}: expected one of {', '.join(OPS)}"
            )
        declaration = cls(
            own["policy"],
            own["ops"],
            Precision.parse(own["activation"]),
            Precision.parse(own["weight"]),
            tuple(config.get("modules_to_not_convert") or ()),
        )
        declaration._check_precisions(config)
        return declaration

    def _check_precisions(self, config: dict[str, Any]) -> None:
        pair = f"activation {self.activation.short()}, weight {self.weight.short()}"
        if not self.is_fp8:
            if self.weight != BF16 or self.activation != BF16:
                raise ValueError(f"{pair}: expected bf16 for both, or FP8 for both")
            return
        if self.activation.format is not Format.E4M3 or self.activation.scale is None or self.weight.scale is None:
            raise ValueError(f"{pair}: an FP8 weight needs an FP8 activation, both with scales")
        block = self.weight.scale.granularity
        group = self.activation.scale.granularity
        if group.rows != 1:
            raise ValueError(
                f"{pair}: activation scales shared by rows make a token's result depend on the other tokens of the "
                f"call (JG019), so policy {self.policy!r} is not served: export with another one, such as jet"
            )
        if block.rows is None or block.cols is None or group != Granularity.per_group(block.cols):
            raise ValueError(f"{pair}: expected activation groups 1xG and weight blocks RxG of the same G")
        if self.weight.scale.format is not Format.F32 or self.activation.scale.format is not Format.F32:
            raise ValueError(f"{pair}: expected f32 scales")
        if not self.activation.scale.dynamic:
            raise ValueError(f"{pair}: expected dynamic activation scales, static ones are not implemented")
        if list(config.get("weight_block_size") or ()) != [block.rows, block.cols]:
            raise ValueError(
                f"weight_block_size {config.get('weight_block_size')} contradicts the declared weight {block}"
            )
