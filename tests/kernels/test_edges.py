"""What the operators cannot do is done another way or refused; nothing comes out silently as 0."""

from pathlib import Path

import pytest
import timm
import torch

import infvit  # noqa: F401  (registers the models)
from infvit.attention import Mask
from infvit.attention.kernels.pure_tiled import second_level_cache
from infvit.attention.pure import pure_infsa
from infvit.errors import ConfigError

PATHS = ("plain", "tiled")


def qkv(tokens: int = 6, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, tokens, 4, dtype=dtype) for _ in range(3))
    return [scale * q, scale * k, v]


@pytest.mark.parametrize("name", ["infvit_pure_mini", "infvit_linear_mini"])
def test_forward_mode_derivative_of_a_model_is_that_of_differences(name):
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=3, img_size=16).double().eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)  # the classifier starts at 0
    x, direction = (torch.randn(1, 3, 16, 16, dtype=torch.float64) for _ in range(2))
    _, tangent = torch.func.jvp(model, (x,), (direction,))
    step = 1e-6
    with torch.no_grad():
        difference = (model(x + step * direction) - model(x - step * direction)) / (2 * step)
    assert difference.abs().max() > 1e-3
    torch.testing.assert_close(tangent, difference, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("name", ["infvit_pure_mini", "infvit_linear_mini"])
def test_gradients_of_torch_func_are_those_of_autograd(name):
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=3, img_size=16).double().eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    x = torch.randn(2, 3, 16, 16, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(model(x).square().sum(), x)
    plain = x.detach()
    torch.testing.assert_close(torch.func.grad(lambda x: model(x).square().sum())(plain), expected)
    one = torch.func.grad(lambda image: model(image[None]).square().sum())
    torch.testing.assert_close(torch.func.vmap(one)(plain), expected)


def test_the_tiled_path_refuses_forward_mode():
    q, k, v = qkv()
    with pytest.raises(ConfigError, match=r"no derivatives of torch\.func"):
        torch.func.grad(lambda x: pure_infsa(x, k, v, path="tiled").sum())(q)
    with pytest.raises(ConfigError, match="forward-mode"):
        torch.func.jvp(lambda x: pure_infsa(x, k, v, path="tiled"), (q,), (q,))


@pytest.mark.parametrize("mask", [Mask(), Mask(causal=True)], ids=["full", "causal"])
@pytest.mark.parametrize("path", PATHS)
def test_a_norm_beyond_float32_is_nan_and_not_0(path, mask):
    assert pure_infsa(*qkv(scale=1e9), mask, path=path).isfinite().all()
    out = pure_infsa(*qkv(scale=1e10), mask, path=path)
    assert out[..., -1, :].isnan().all()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "change",
    [
        lambda q, k, v: (q, k[:, :1], v[:, :1]),
        lambda q, k, v: (q, k[..., :3], v),
        lambda q, k, v: (q, k, v[:, :, 1:]),
        lambda q, k, v: (q[0], k[0], v[0]),
        lambda q, k, v: (q[..., :0], k[..., :0], v),
    ],
    ids=["heads", "channels", "length", "3-D", "no channels"],
)
def test_shapes_that_do_not_fit_are_named(change, path):
    with pytest.raises(ConfigError, match=r"\(B, H, M, D\).*got"):
        pure_infsa(*change(*qkv()), path=path)


def test_integers_are_refused():
    q, k, v = qkv()
    with pytest.raises(ConfigError, match="floating-point"):
        pure_infsa(q, k, v.long())


@pytest.mark.parametrize(("said", "size"), [("512K\n", 2**19), ("2048K\n", 2**21), ("much", 2**20), (None, 2**20)])
def test_the_size_of_the_cache_is_what_the_system_says(monkeypatch, said, size):
    def read_text(path: Path) -> str:
        if said is None:
            raise FileNotFoundError(path)
        return said

    monkeypatch.setattr(Path, "read_text", read_text)
    assert second_level_cache() == size
