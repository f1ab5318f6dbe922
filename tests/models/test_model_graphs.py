"""torch.compile, torch.export, TorchScript and FX."""

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import infvit
from infvit.attention import AttentionLayer

pytestmark = pytest.mark.slow

Build = Callable[..., nn.Module]
Images = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """Leaves no compiled code behind."""
    yield
    torch._dynamo.reset()


def test_compile_without_graph_breaks(name: str, build: Build, images: Images):
    model = build(name, depth=1).train()
    x = images(model)
    results = []
    for function in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        model.zero_grad()
        logits = function(x)
        logits.square().sum().backward()
        results.append((logits.detach(), [p.grad.clone() for p in model.parameters()]))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


def test_export_with_a_free_batch_size(name: str, build: Build, images: Images):
    model = build(name, depth=1)
    x = images(model)
    for _ in range(2):
        program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=2, max=64)},))
        other = torch.cat([x, -x, 2 * x])
        with torch.no_grad():
            torch.testing.assert_close(program.module()(other), model(other), rtol=1e-4, atol=1e-5)
        infvit.reparameterize(model)  # and once more in the form for inference


@pytest.mark.parametrize("training", [False, True])
def test_torchscript(mini: str, training: bool, build: Build, images: Images):
    """At another batch size than the one it was traced with; the model itself stays what it is."""
    model = build(mini, depth=1).train(training)
    x = images(model, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(model)
    assert isinstance(model.blocks[0].attn, AttentionLayer)
    with torch.no_grad():
        torch.testing.assert_close(scripted(x), model(x), rtol=1e-4, atol=1e-5)
        with pytest.raises(torch.jit.Error, match="masks are not available"):
            scripted(x, is_causal=True)


def test_fx_keeps_the_attention_layer_whole(mini: str, build: Build, images: Images):
    from timm.models import get_notrace_modules
    from torchvision.models.feature_extraction import create_feature_extractor

    model = build(mini, depth=1)
    x = images(model)
    traced = create_feature_extractor(
        model, ["blocks.0.attn", "head"], tracer_kwargs={"leaf_modules": get_notrace_modules()}
    )
    with torch.no_grad():
        nodes = traced(x)
        torch.testing.assert_close(nodes["head"], model(x))
    assert nodes["blocks.0.attn"].shape == (2, model.patch_embed.num_patches + 1, model.embed_dim)
