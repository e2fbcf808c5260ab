"""`jetgraph diverge`: two graphs on one prompt and the weights of a model folder, or a live engine against training."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jetgraph.diverge import (
    Comparison,
    Recording,
    RecordingReport,
    Side,
    compare_graphs,
    compare_recording,
    comparison_json,
    comparison_text,
    recording_json,
    recording_text,
)
from jetgraph.engines import get_engine
from jetgraph.export import read_tensors
from jetgraph.graph import PrecisionGraph
from jetgraph.interpret import InterpretError, Quantized
from jetgraph.mismatch import Difference
from jetgraph.modes import Mode, demo_prompts, run_modes
from jetgraph.modes import Side as ModeSide
from jetgraph.pair import exported_folder
from jetgraph.verify import Source, verify

PROMPT_LENGTH = 53
CHUNK = 16
"""Tokens of a prompt that the recorded engine runs in one step: chunks and decoding are both seen."""
SCALES = "_scale_inv"

Leaves = dict[str, Tensor | Quantized]


class CannotRun(Exception):
    """A graph holds something that has no meaning here: the answer is unknown, neither yes nor no."""


@dataclass(frozen=True)
class Findings:
    """What `jetgraph diverge` says; ``mismatch`` and ``recording`` are of a live engine."""

    comparison: Comparison
    mismatch: Difference | None = None
    recording: RecordingReport | None = None

    @property
    def exit_status(self) -> int:
        """0 nothing differs, 1 something does, 3 nothing was seen to, but not everything could be run."""
        differs = self.mismatch is not None and self.mismatch.num_exact < self.mismatch.num_tokens
        parts = {found.exit_status for found in (self.comparison, self.recording) if found is not None}
        return 1 if differs or 1 in parts else 3 if 3 in parts else 0

    def text(self) -> str:
        lines = []
        if self.mismatch is not None:
            m = self.mismatch
            lines.append(
                f"{m.num_tokens} tokens: mean |Δlogprob| {m.mean:.3g}, max {m.max:.3g}, exactly 0 on {m.num_exact} "
                f"({m.fraction_exact:.1%}), k3 {m.k3:.3g}"
            )
        if self.recording is not None:
            lines.append(recording_text(self.recording))
        return "\n".join([*lines, comparison_text(self.comparison)])

    def to_plain(self) -> dict[str, Any]:
        found = self.mismatch
        return {
            "jetgraph_diverge": 1,
            "exit_status": self.exit_status,
            "mismatch": None if found is None else asdict(found) | {"num_exact": found.num_exact},
            "live": None if self.recording is None else recording_json(self.recording),
            "graphs": comparison_json(self.comparison),
        }


def between_files(
    train: Path,
    infer: Path,
    model_dir: Path,
    *,
    served: Path | None = None,
    ids: Sequence[int] | None = None,
    every: bool = False,
    device: str = "cpu",
) -> Comparison:
    """Run both graphs on the weights of ``model_dir`` and on ``ids`` (else fixed random ones), and compare.

    Args:
        device: where both are run; a graph gives its own bits on the kind of device that it was captured on.
        served: the checkpoint that the engine loads, with its own codes and scales; without it the rollout quantises
            the same masters by its own rule, so its stored codes are not looked at.

    Raises:
        GraphError, ValueError: a file cannot be read, or the prompt does not fit the model.
        CannotRun: a node cannot be run, or a leaf has no value in the folders.
    """
    sources = Source.load(train, "train"), Source.load(infer, "infer")
    masters = master_leaves(model_dir)
    stored = {} if served is None else stored_leaves(served)
    prompt = prompt_leaves(prompt_ids(model_dir, ids))
    rollout = padded(sources[1].graph, {**masters, **stored, **prompt})
    leaves = {**masters, **prompt}, rollout
    sides = [Side(s.graph, on_device(given, device)) for s, given in zip(sources, leaves, strict=True)]
    try:
        return compare_graphs(*sides, verify(*sources), every=every)
    except InterpretError as error:
        raise CannotRun(str(error)) from error


def with_recording(
    train: Path, infer: Path | None, model_dir: Path, recording: Recording, *, device: str = "cpu"
) -> RecordingReport:
    """Hold what an engine recorded against training's graph on the weights of ``model_dir``.

    ``infer`` is the engine's graph, if it was captured: then the report names the entries that explain a difference.

    Raises:
        CannotRun: a node of training's graph cannot be run.
    """
    graph = PrecisionGraph.load(train)
    faults = () if infer is None else verify(graph, PrecisionGraph.load(infer)).faults
    try:
        return compare_recording(Side(graph, on_device(master_leaves(model_dir), device)), recording, faults)
    except InterpretError as error:
        raise CannotRun(str(error)) from error


def in_live_engine(
    model_dir: Path,
    policy: str,
    engine: str,
    work: Path,
    *,
    prompt: Sequence[int] | None = None,
    stock: bool = False,
    max_tokens: int = 32,
    every: bool = False,
    device: str = "cpu",
    say: Callable[[str], None] = print,
) -> Findings:
    """Sample from a live engine, score with training, and say where the two part, in the engine and in the graphs.

    ``prompt``, or the demo's, or a random one for a model without a tokenizer; the first is run once more with hooks in
    the engine's modules, in small chunks and then token by token.  ``device`` is where training runs; the engine takes
    the machine's GPU if there is one.

    Raises:
        CannotRun: a node of a graph cannot be run, so no place can be named.
    """
    side = ModeSide(policy, stock)
    asks = prompt is None and any(model_dir.glob("tokenizer*"))  # a random model has no tokenizer
    prompts = demo_prompts(model_dir) if asks else [prompt_ids(model_dir, prompt).tolist()]
    mode = Mode(policy, side, side)
    (report,) = run_modes(
        model_dir, [mode], prompts, work, engine=engine, max_tokens=max_tokens, device=device, say=say
    )
    served = model_dir if stock else exported_folder(work, policy)
    say("recording one request at the borders of linears")
    recording = get_engine(engine).record(served, prompts[0], max_tokens=max_tokens, tokens=CHUNK, say=say)
    live = with_recording(report.train, report.infer, model_dir, recording, device=device)
    ids = [*recording.prompt, *recording.tokens]
    graphs = between_files(
        report.train, report.infer, model_dir, served=None if stock else served, ids=ids, every=every, device=device
    )
    return Findings(graphs, report.mismatch, live)


def master_leaves(model_dir: Path) -> Leaves:
    """Parameters and buffers by name, as training holds them: BF16."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16)
    return {name: tensor.detach() for name, tensor in (*model.named_buffers(), *model.named_parameters())}


def stored_leaves(served: Path) -> Leaves:
    """The tensors of a checkpoint that an engine loads; codes with their scales under the weight's name."""
    tensors = dict(read_tensors(served))
    leaves: Leaves = {name: tensor for name, tensor in tensors.items() if not name.endswith(SCALES)}
    for name in tensors:
        if name.endswith(SCALES):
            weight = name.removesuffix(SCALES)
            if weight not in tensors:
                raise ValueError(f"{served}: {name} has no weight beside it")
            leaves[weight] = Quantized(tensors[weight], tensors[name])
    return leaves


def on_device(leaves: Leaves, device: str) -> Leaves:
    """The leaves there; a tensor under several names is moved once."""
    moved: dict[int, Tensor] = {}

    def move(x: Tensor) -> Tensor:
        if id(x) not in moved:
            moved[id(x)] = x.to(device)
        return moved[id(x)]

    return {n: Quantized(*map(move, x)) if isinstance(x, Quantized) else move(x) for n, x in leaves.items()}


def padded(graph: PrecisionGraph, leaves: Leaves) -> Leaves:
    """The leaves with zero rows below parameters that the engine holds longer: it pads the vocabulary."""
    found = dict(leaves)
    for node in graph.nodes:
        leaf = leaves.get(str(node.attr("name"))) if node.op == "parameter" else None
        if isinstance(leaf, Tensor) and leaf.ndim == 2 and leaf.shape[0] < int(node.type.shape[0]):
            more = int(node.type.shape[0]) - leaf.shape[0]
            found[str(node.attr("name"))] = torch.nn.functional.pad(leaf, (0, 0, 0, more))
    return found


def prompt_ids(model_dir: Path, ids: Sequence[int] | None) -> Tensor:
    """int64 [T]: ``ids``, or `PROMPT_LENGTH` fixed random ones of the model's vocabulary."""
    vocabulary = int(json.loads((model_dir / "config.json").read_text())["vocab_size"])
    if ids is None:
        return torch.randint(0, vocabulary, (PROMPT_LENGTH,), generator=torch.Generator().manual_seed(0))
    wrong = [i for i in ids if not 0 <= i < vocabulary]
    if len(ids) < 2 or wrong:
        raise ValueError(f"a prompt needs at least two token ids below {vocabulary}; got {wrong[:3] or len(ids)}")
    return torch.tensor(list(ids))


def prompt_leaves(ids: Tensor) -> Leaves:
    """What the graphs of one sequence read beside weights; ids [T]."""
    return {"input_ids": ids, "positions": torch.arange(len(ids)), "targets": ids.roll(-1)}


def read_ids(text: str) -> list[int]:
    """Token ids: "1,2,3", or the path of a JSON file with a list of them."""
    content = Path(text).read_text() if Path(text).is_file() else f"[{text}]"
    try:
        ids = json.loads(content)
    except json.JSONDecodeError as error:
        raise ValueError(f"--ids {text}: expected numbers with commas between, or a JSON file with a list") from error
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise ValueError(f"--ids {text}: expected a list of whole numbers")
    return ids
