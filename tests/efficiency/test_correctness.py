"""The gate before a ratio: the right mechanisms pass at every precision, wrong ones do not."""

import pytest
import timm
import torch

from infvit.attention import AttentionLayer
from infvit.evaluation.efficiency import check
from infvit.evaluation.efficiency.check import Check, check_layer
from infvit.evaluation.efficiency.subject import attention_layer

CPU = torch.device("cpu")
GIB = 2.0**30


def layer_of(mechanism: str, **args: object) -> AttentionLayer:
    return AttentionLayer(48, 6, qkv_bias=True, mechanism=mechanism, double_proj=True, **args)


def look(
    layer: AttentionLayer, precision: torch.dtype = torch.float32, training: bool = False, tokens: int = 130
) -> Check:
    return check_layer(layer, tokens, CPU, precision, training, GIB)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mechanism", ["softmax", "infsa_pure", "infsa_linear"])
def test_right_ones_pass(mechanism: str, precision: torch.dtype, training: bool) -> None:
    found = look(layer_of(mechanism), precision, training)
    assert (found.state, found.tokens) == ("right", 130), found
    assert found.error is not None
    assert found.error < check.TOLERANCE[precision] / 2  # not by a hair
    assert found.error > 0  # something was computed in this precision


@pytest.mark.parametrize("args", [{"mechanism_args": {"gamma": 0.3, "activation": "abs"}}, {"tie_key": False}])
def test_hyperparameters_of_the_layer_count(args: dict) -> None:
    assert look(layer_of("infsa_linear", **args), training=True).state == "right"
    assert look(layer_of("infsa_pure", **args), training=True).state == "right"


@pytest.mark.parametrize("mechanism", ["test_unscaled", "test_last_head", "test_nan", "test_only_long"])
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_wrong_ones_are_found(broken: None, mechanism: str, precision: torch.dtype) -> None:
    found = look(layer_of(mechanism), precision, tokens=256)
    assert found.state == "wrong", found
    assert found.error is None if mechanism == "test_nan" else found.error > check.TOLERANCE[precision]


def test_a_wrong_gradient_is_found_where_gradients_are_used(broken: None) -> None:
    layer = layer_of("test_wrong_gradient")
    assert look(layer).state == "right"
    found = look(layer, training=True)
    assert found.state == "wrong"
    assert found.error == pytest.approx(0.05, rel=0.2)


def test_only_its_own_size_tells(broken: None) -> None:
    """A kernel whose last tile is broken is right at fewer tokens: so the check takes those that were measured."""
    layer = layer_of("test_only_long")
    assert look(layer, tokens=130).state == "right"
    assert look(layer, tokens=257).state == "wrong"


def test_the_layer_stays_as_it_was() -> None:
    layer = layer_of("infsa_linear")
    before = [p.clone() for p in layer.parameters()]
    look(layer, torch.bfloat16, training=True)
    assert all(torch.equal(a, b) for a, b in zip(before, layer.parameters(), strict=True))
    assert all(p.grad is None for p in layer.parameters())


def test_fewer_tokens_where_the_reference_would_not_fit() -> None:
    memory = 8.0 * 10 * 100**2
    assert check_layer(layer_of("softmax"), 1000, CPU, torch.float32, False, memory).tokens == 100
    assert check_layer(layer_of("softmax"), 90, CPU, torch.float32, False, memory).tokens == 90


def test_memory_that_runs_out_halves_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def scarce(layer: AttentionLayer, tokens: int, *_: object) -> float:
        tried.append(tokens)
        if tokens > limit:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return 0.0

    monkeypatch.setattr(check, "_worst", scarce)
    limit = 300
    found = look(layer_of("softmax"), tokens=1001)
    assert (found.state, found.tokens, tried) == ("right", 250, [1001, 500, 250])
    limit = 10
    found = look(layer_of("softmax"), tokens=200)
    assert (found.state, found.tokens) == ("unchecked", None)
    assert "does not fit" in str(found.reason)


def test_other_errors_are_not_taken_for_a_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> float:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(check, "_worst", fails)
    with pytest.raises(RuntimeError, match="illegal"):
        look(layer_of("softmax"))


def test_attention_of_timm_has_no_reference() -> None:
    assert attention_layer(timm.create_model("test_vit")) is None
    assert check_layer(None, 50, CPU, torch.float32, False).state == "no reference"
