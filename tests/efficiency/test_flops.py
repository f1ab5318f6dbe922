"""FLOPs: formula against counter, and what the counter passes over."""

import pytest
import timm
import torch
from torch.nn import functional as F

import infvit
from infvit.attention import list_mechanisms
from infvit.evaluation.efficiency.cells import Cell
from infvit.evaluation.efficiency.cost import complexity, cost
from infvit.metrics.flops import count, formula
from infvit.models.build import unfuse

ARGS = {"img_size": 48, "patch_size": 8, "embed_dim": 40, "depth": 3, "num_heads": 5, "num_classes": 7}


def model_of(name: str, folded: bool = False, **args: object) -> torch.nn.Module:
    with torch.device("meta"):
        model = timm.create_model(name, **{**ARGS, **args}).eval()
    unfuse(model)
    return infvit.reparameterize(model) if folded else model


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("vit_mini", {}),
        ("vit_mini", {"mlp_ratio": 2, "reg_tokens": 3}),
        ("infvit_pure_mini", {}),
        ("infvit_linear_mini", {}),
        ("infvit_linear_mini", {"tie_key": False}),
        ("infvit_linear_mini", {"num_heads": 10, "num_classes": 0}),
    ],
)
def test_formula_is_what_the_counter_counts(name: str, args: dict, folded: bool) -> None:
    model = model_of(name, folded, **args)
    counted = count(lambda: model(torch.empty(1, 3, 48, 48, device="meta")))
    assert counted.missed == ()
    assert formula(model) == counted.total > 0


@pytest.mark.parametrize("name", list_mechanisms())
@pytest.mark.parametrize("side", [24, 48])  # fewer tokens than landmarks, and more
def test_every_mechanism_has_a_formula(name: str, side: int) -> None:
    args = {"linformer": {"projected_tokens": 6}, "nystromformer": {"num_landmarks": 12, "conv_kernel": 5},
            "singularformer": {"rank": 3}, "performer": {"num_features": 11}}.get(name, {})  # fmt: skip
    model = model_of("vit_mini", attention=name, img_size=side, **args)
    counted = count(lambda: model(torch.empty(1, 3, side, side, device="meta")))
    assert counted.missed == ()
    assert formula(model) == counted.total
    layer = model.blocks[0].attn
    tokens = 1 + (side // 8) ** 2
    core, inputs = layer.core, [torch.empty(1, 5, tokens, 8, device="meta") for _ in range(3)]
    inputs[0] = torch.empty(1, 5, tokens, 8 + core.extra_dim, device="meta")
    assert 2 * core.macs(tokens) == count(lambda: core(*inputs)).total > 0


def test_models_without_a_formula() -> None:
    assert formula(timm.create_model("test_resnet")) is None
    assert formula(model_of("vit_mini", global_pool="avg")) is None


def test_a_product_by_hand() -> None:
    a, b = torch.randn(3, 5), torch.randn(5, 7, requires_grad=True)
    assert count(lambda: a @ b).total == 2 * 3 * 5 * 7
    assert count(lambda: (a @ b).sum().backward()).total == 2 * 2 * 3 * 5 * 7  # and the gradient of b


def test_the_fused_kernel_is_reported_as_missed() -> None:
    q = torch.randn(1, 2, 64, 16)
    with torch.no_grad():
        counted = count(lambda: F.scaled_dot_product_attention(q, q, q))
    assert counted.total == 0
    assert [name for name in counted.missed if "attention" in name]


def test_an_operation_of_a_library_is_reported_as_missed() -> None:
    @torch.library.custom_op("infvit_test::product", mutates_args=())
    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ b

    a = torch.randn(4, 4)
    assert count(lambda: (product(a, a) + a).relu()).missed == ("infvit_test.product",)


def test_cost_of_a_cell() -> None:
    """Inference is folded, training is not; a step is a bit less than three forward passes: images need no gradient."""
    infer, train = (cost(Cell("vit_mini", mode, 32)) for mode in ("inference", "training"))
    fused = cost(Cell("vit_mini:unfused", "inference", 32))
    assert infer["flops"] == infer["flops_formula"] == fused["flops"]
    assert (infer["tokens"], infer["flops_reason"]) == (65, None)
    projection = 2 * 4 * 65 * 96 * 96
    last_mlp = 2 * 64 * 2 * 96 * 4 * 96  # of the patches; the form for inference applies it to the class token
    assert train["flops_formula"] == infer["flops"] + projection + last_mlp
    embedding = 2 * 64 * 3 * 16 * 96
    assert train["flops"] == 3 * train["flops_formula"] - embedding
    assert train["parameters"] - infer["parameters"] == 4 * (96 * 96 + 96)
    alone = cost(Cell("vit_mini", "inference", 32, scope="attention"))
    assert alone["flops"] == 2 * 2 * 65 * 65 * 96
    assert cost(Cell("vit_mini", "training", 32, scope="attention"))["flops"] == 3 * alone["flops"]


def test_a_counter_that_disagrees_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infvit.evaluation.efficiency.cost.flops.formula", lambda model: 1)
    found = cost(Cell("vit_mini", "inference", 32))
    assert (found["flops"], found["flops_formula"]) == (None, 1)
    assert "the formula 1 for" in found["flops_reason"]


def test_growth_is_read_off_the_counts() -> None:
    models = ("vit_mini", "infvit_pure_mini", "infvit_linear_mini")
    assert [complexity(model, 4) for model in models] == ["quadratic", "quadratic", "linear"]
    assert complexity("timm/test_resnet", None) == "unknown"
