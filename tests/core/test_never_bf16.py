"""Whatever is done to a compiled model, its linears run the FP8 flow or raise; and the coverage report says which."""

from __future__ import annotations

import copy
import io
import types

import pytest
import torch

import jetgraph
from jetgraph import backend as backend_module
from jetgraph.compiler import CompileError
from jetgraph.coverage import CoverageError
from jetgraph.linear import Linear, PrecisionError
from jetgraph.lowering.masks import Mask
from jetgraph.policy import FP8Recipe, Policy, Rule, get_policy
from tests.core.small_models import one_step, random_ids, random_model

pytestmark = pytest.mark.slow
CAUSAL = Mask("0", None)


@pytest.fixture(scope="module")
def expected():
    """Logits and gradients of one compiled step: (seed 0, one sequence of 40 tokens)."""
    model = jetgraph.compile(random_model(), "jet")
    return one_step(model, random_ids(model, 1, 40))


@pytest.fixture
def model():
    return jetgraph.compile(random_model(), "jet")


def assert_step_equals(model, expected) -> None:
    logits, gradients = one_step(model, random_ids(model, 1, 40))
    assert torch.equal(logits, expected[0])
    assert [n for n in expected[1] if not torch.equal(gradients[n], expected[1][n])] == []


def test_coverage_counts_every_linear_after_a_step(model, expected):
    with pytest.raises(CoverageError, match=r"15 of 15 linears .*model.layers.0.self_attn.q_proj: not seen to run"):
        model.jetgraph.coverage().require()
    assert_step_equals(model, expected)
    report = model.jetgraph.coverage().require()
    assert len(report.rows) == 15
    by_name = {row.fqn: row for row in report.rows}
    assert by_name["model.layers.1.mlp.up_proj"].ran == "region x1"
    assert by_name["model.layers.1.mlp.up_proj"].roles == ("FPROP", "DGRAD", "WGRAD")
    assert by_name["lm_head"].ran == "eager x1"
    assert by_name["lm_head"].declared == "bf16"
    assert "15 of 15 linears ran as declared" in str(report)


def test_a_copied_model_and_a_copied_block(model, expected):
    twin = copy.deepcopy(model)
    assert_step_equals(twin, expected)
    assert twin.jetgraph.coverage().require().rows[0].calls_in_region == 1
    block = copy.deepcopy(model.model.layers[0])
    assert all(isinstance(m, Linear) for m in block.modules() if isinstance(m, torch.nn.Linear))
    hidden = torch.randn(1, 40, 320, dtype=torch.bfloat16)
    rotary = model.model.rotary_emb(hidden, torch.arange(40)[None])
    assert torch.equal(
        block(hidden, position_embeddings=rotary, attention_mask=CAUSAL),
        model.model.layers[0](hidden, position_embeddings=rotary, attention_mask=CAUSAL),
    )


def test_an_unpickled_model_runs_and_compiles_again(model, expected):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert loaded.jetgraph.model is loaded
    assert_step_equals(loaded, expected)
    assert {row.ran for row in loaded.jetgraph.coverage().require().rows} == {"eager x1"}
    assert_step_equals(jetgraph.compile(loaded, "jet"), expected)
    assert loaded.jetgraph.coverage().require().rows[0].calls_in_region == 1


def test_eager_stance_and_a_block_called_by_hand(model, expected):
    with torch.compiler.set_stance("force_eager"):
        assert_step_equals(model, expected)
    assert {row.ran for row in model.jetgraph.coverage().rows} == {"eager x1"}
    hidden = torch.randn(1, 9, 320, dtype=torch.bfloat16)
    rotary = model.model.rotary_emb(hidden, torch.arange(9)[None])
    layer = model.model.layers[0]
    assert torch.equal(
        layer.forward(hidden, position_embeddings=rotary, attention_mask=CAUSAL),
        layer(hidden, position_embeddings=rotary, attention_mask=CAUSAL),
    )


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_second_torch_compile_around_it(model, expected, backend):
    ids = random_ids(model, 1, 40)
    with torch.no_grad():
        logits = torch.compile(model, backend=backend)(input_ids=ids, use_cache=False).logits
    assert torch.equal(logits, expected[0])
    unseen = [row.fqn for row in model.jetgraph.coverage().problems]
    assert unseen == ["lm_head"]  # the other compiler's: it calls our operator, and nobody counts


def test_a_linear_compiled_by_someone_else_runs_fp8():
    linear = random_model(layers=1).model.layers[0].mlp.up_proj
    holder = torch.nn.ModuleDict({"up": linear})
    from jetgraph.linear import convert

    convert(linear, "up", get_policy("jet").linear("model.layers.0.mlp.up_proj"))
    x = torch.randn(9, 320, dtype=torch.bfloat16)
    seen = []

    def backend(module, inputs):
        seen.extend(str(n.target) for n in module.graph.nodes)
        return module.forward

    compiled = torch.compile(holder["up"], backend=backend)
    assert torch.equal(compiled(x), linear(x))
    assert any("jetgraph.linear" in target for target in seen)


def test_generate_with_a_cache_is_the_same_flow():
    model = jetgraph.compile(random_model(layers=4), "jet").eval()
    ids = random_ids(model, 2, 11)
    out = model.generate(ids, max_new_tokens=6, do_sample=False, use_cache=True, output_logits=True,
                         return_dict_in_generate=True, pad_token_id=0)  # fmt: skip
    report = model.jetgraph.coverage().require()
    assert all(row.calls_eager == 6 for row in report.rows)
    assert model.jetgraph.num_compiles == 0
    with torch.no_grad():
        whole = model(input_ids=out.sequences, use_cache=False).logits
    for step, logits in enumerate(out.logits):
        assert torch.equal(logits, whole[:, 10 + step].float())


def test_a_graph_break_inside_a_block_raises(model, monkeypatch):
    mlp = type(model.model.layers[0].mlp)
    plain = mlp.forward

    def broken(self, x):
        torch._dynamo.graph_break()
        return plain(self, x)

    monkeypatch.setattr(mlp, "forward", broken)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"graph_break"):
        one_step(model, random_ids(model, 1, 40))


def test_the_recompile_limit_raises(model, monkeypatch):
    monkeypatch.setattr(backend_module, "recompile_limit", lambda: 1)
    torch._dynamo.reset()
    one_step(model, random_ids(model, 1, 40))
    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit), torch.no_grad():
        model(input_ids=random_ids(model, 1, 40), use_cache=False)


def test_float32_without_autocast_raises():
    model = jetgraph.compile(random_model().float(), "jet")
    with pytest.raises(Exception, match=r"expected torch.bfloat16. With FP32 masters train under torch.autocast"):
        one_step(model, random_ids(model, 1, 40))
    linear = model.model.layers[0].mlp.up_proj
    with pytest.raises(PrecisionError, match=r"model.layers.0.mlp.up_proj: input is torch.float32"):
        linear(torch.randn(4, 320))
    with torch.autocast("cpu", dtype=torch.float16), pytest.raises(PrecisionError):
        linear(torch.randn(4, 320))


class LoraLinear(torch.nn.Module):
    """An adapter as PEFT makes it: the linear it wraps, and two small ones."""

    def __init__(self, base: torch.nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = torch.nn.Linear(base.in_features, rank, bias=False, dtype=torch.bfloat16)
        self.lora_B = torch.nn.Linear(rank, base.out_features, bias=False, dtype=torch.bfloat16)
        base.weight.requires_grad_(False)

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def add_adapters(model) -> None:
    for layer in model.model.layers:
        layer.self_attn.q_proj = LoraLinear(layer.self_attn.q_proj)


def test_adapters_added_before_compile_follow_their_rule():
    model = random_model()
    add_adapters(model)
    rules = (Rule(r"re:.*\.lora_[AB]", None), Rule(r"re:.*\.layers\..*", FP8Recipe()), Rule("lm_head", None))
    jetgraph.compile(model, Policy("lora", "", rules, rules))
    one_step(model, random_ids(model, 1, 40))
    rows = {row.fqn: row for row in model.jetgraph.coverage().require().rows}
    assert rows["model.layers.0.self_attn.q_proj.lora_A"].declared == "bf16"
    base = rows["model.layers.0.self_attn.q_proj.base_layer"]
    assert base.declared == "f8e4m3[128x128]"
    assert base.roles == ("FPROP", "DGRAD")
    assert model.model.layers[0].self_attn.q_proj.base_layer.weight.grad is None
    assert model.model.layers[0].self_attn.q_proj.lora_B.weight.grad is not None


def test_adapters_added_after_compile_raise(model):
    add_adapters(model)
    with pytest.raises(Exception, match=r"q_proj.lora_A was added after .* would silently run in BF16"):
        one_step(model, random_ids(model, 1, 40))
    with pytest.raises(CompileError, match=r"q_proj.lora_A was added after"):
        model.eval().generate(random_ids(model, 1, 4), max_new_tokens=1, use_cache=True, pad_token_id=0)
    with pytest.raises(CoverageError, match=r"q_proj.lora_A: BF16, added after compile"):
        model.jetgraph.coverage().require()


def test_a_block_of_another_policy_put_in_after_compile_raises_and_is_a_problem(model):
    model.model.layers[1].mlp = jetgraph.compile(random_model(), "bf16").model.layers[1].mlp
    with pytest.raises(
        Exception, match=r"'mlp.gate_proj'.* are FP8 in policy 'jet', but their forward does not appear"
    ):
        one_step(model, random_ids(model, 1, 40))
    with pytest.raises(CoverageError, match=r"layers.1.mlp.gate_proj: bf16 \(bf16: \*\); expected f8e4m3"):
        model.jetgraph.coverage().require()


def test_a_weight_used_without_its_linear_raises(model):
    """In the first graph and in any later one: each variant of a block must hold every FP8 linear that it declares."""
    one_step(model, random_ids(model, 1, 40))

    def forward(self, x):
        gate = torch.nn.functional.linear(x, self.gate_proj.weight)
        return self.down_proj(self.act_fn(gate) * self.up_proj(x))

    for layer in model.model.layers:
        layer.mlp.forward = types.MethodType(forward, layer.mlp)
    with pytest.raises(Exception, match=r"'mlp.gate_proj'.* their forward does not appear in what the block runs"):
        one_step(model, random_ids(model, 1, 40))


def test_two_linears_with_one_weight_and_one_input_are_named():
    model = random_model()
    for layer in model.model.layers:
        layer.mlp.up_proj.weight = layer.mlp.gate_proj.weight
    jetgraph.compile(model, "jet")
    both = r"layers.0.mlp.up_proj and model.layers.0.mlp.gate_proj hold one weight .* give each a weight of its own"
    with pytest.raises(Exception, match=both):
        one_step(model, random_ids(model, 1, 40))


def test_a_forward_set_on_the_instance_keeps_its_names(model, expected):
    for layer in model.model.layers:
        layer.mlp.forward = types.MethodType(type(layer.mlp).forward, layer.mlp)
    assert_step_equals(model, expected)
    model.jetgraph.coverage().require()


def test_one_layer_at_two_places_has_one_precision():
    model = random_model()
    model.model.layers[1].mlp.down_proj = model.model.layers[0].mlp.down_proj
    policy = get_policy("jet").override("model.layers.0.mlp.down_proj", None)
    with pytest.raises(CompileError, match=r"layers.0.mlp.down_proj and model.layers.1.mlp.down_proj are one layer"):
        jetgraph.compile(model, policy)
    assert type(model.lm_head) is torch.nn.Linear  # refused before anything was changed


def test_attention_and_head_changed_after_compile_are_problems(model, expected):
    assert_step_equals(model, expected)
    model.set_attn_implementation("sdpa")
    with pytest.raises(CoverageError, match="attention 'sdpa' was set after compile"):
        model.jetgraph.coverage().require()
    model.set_attn_implementation("jetgraph")
    model.lm_head = torch.nn.Linear(320, 512, bias=False, dtype=torch.bfloat16)
    with pytest.raises(CoverageError, match="lm_head: torch's own GEMM, added after compile"):
        model.jetgraph.coverage().require()


def test_attention_that_is_no_longer_causal_raises(model):
    model.model.layers[0].self_attn.is_causal = False
    with pytest.raises(Exception, match="Qwen3Attention has is_causal=False"):
        one_step(model, random_ids(model, 1, 40))


def test_a_linear_with_a_forward_of_its_own_is_refused():
    class Scaled(torch.nn.Linear):
        def forward(self, input):
            return super().forward(input) * 2

    model = random_model()
    model.model.layers[0].mlp.up_proj.__class__ = Scaled
    with pytest.raises(CompileError, match=r"mlp.up_proj is a Scaled, which replaces nn.Linear's forward"):
        jetgraph.compile(model, "jet")
    model.model.layers[0].mlp.up_proj.__class__ = torch.nn.Linear
    jetgraph.compile(model, "jet")  # the refusal changed nothing
