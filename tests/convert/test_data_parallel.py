"""Converted models in DistributedDataParallel: no parameter goes unused, and gradients are the mean over processes."""

import warnings

import pytest
import timm
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import infvit


def torch_encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def timm_vit() -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", img_size=32, embed_dim=16, depth=2, num_heads=2, num_classes=3)


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(vocab_size=11, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
                                      num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
    return transformers.LlamaForCausalLM(config)


INPUTS = {
    torch_encoder: lambda: torch.randn(2, 5, 8, dtype=torch.float64),
    timm_vit: lambda: torch.randn(2, 3, 32, 32, dtype=torch.float64),
    llama: lambda: torch.randint(11, (2, 6)),
}


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out = model(x)
    return getattr(out, "logits", out).square().sum()


@pytest.mark.parametrize("mechanism", ["infsa_pure", "infsa_linear"])
@pytest.mark.parametrize("build", INPUTS, ids=lambda build: build.__name__)
def test_two_processes(build, mechanism, ranks):
    """Two steps each: DDP raises in the second one if a parameter got no gradient in the first."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Linear in a language model
        model = infvit.convert(build().double().train(), mechanism)
    parts = [INPUTS[build]() for _ in range(2)]
    expected = torch.autograd.grad(sum(loss(model, x) for x in parts) / 2, list(model.parameters()))

    def work(rank: int) -> list[torch.Tensor]:
        torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
        wrapped = DistributedDataParallel(model)
        for _ in range(2):
            wrapped.zero_grad()
            loss(wrapped, parts[rank]).backward()
        return [parameter.grad.numpy() for parameter in model.parameters()]

    for got in ranks(2, work):
        assert isinstance(got, list), got
        for gradient, wanted in zip(got, expected, strict=True):
            assert_close(torch.from_numpy(gradient), wanted, rtol=1e-9, atol=1e-12)
    assert any("decay" in name for name, _ in model.named_parameters())
