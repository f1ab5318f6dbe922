"""Times the attention branch with its projections, for every registered mechanism: `python benchmarks/attention.py`.

All candidates run in turn, round after round, so that a change of the machine's load hits each of them alike: compare
the ratios. Before timing, the absorbed form of a mechanism is checked against its plain form.
"""

import argparse
import time
from collections.abc import Sequence
from importlib import import_module
from statistics import quantiles

import torch
from timm.layers import Mlp
from torch import Tensor, nn
from torch.testing import assert_close

from infvit.attention import NO_MASK, AttentionLayer, get_mechanism, list_mechanisms

PROJECTION = "one d x d projection"


def build(
    mechanism: str, width: int, heads: int, dtype: torch.dtype, *, tokens: int | None = None, plain: bool = False
) -> AttentionLayer:
    """Returns a layer; layers of one mechanism have equal parameters."""
    torch.manual_seed(0)
    args = {} if get_mechanism(mechanism).capabilities.any_length else {"num_tokens": tokens}
    layer = AttentionLayer(width, heads, qkv_bias=True, mechanism=mechanism, mechanism_args=args, dtype=dtype)
    if plain:
        layer.core.absorbs = lambda mask: False  # type: ignore[method-assign]
    return layer


def gradients(module: nn.Module, x: Tensor) -> list[Tensor]:
    """Returns the output and the gradients of the input and of every parameter."""
    x = x.detach().requires_grad_()
    out = module(x)
    return [out, *torch.autograd.grad(out.sin().sum(), [x, *module.parameters()])]


def candidates(mechanisms: Sequence[str], width: int, heads: int, tokens: int) -> dict[str, nn.Module]:
    """Builds what is timed, by the name shown; checks absorbed against plain forms first.

    Raises:
        AssertionError: the forms differ.
    """
    modules: dict[str, nn.Module] = {PROJECTION: nn.Linear(width, width), "MLP": Mlp(width, 4 * width)}
    for name in mechanisms:
        layer = build(name, width, heads, torch.float32, tokens=tokens)
        if not layer.core.absorbs(NO_MASK):
            modules[name] = layer
            continue
        x = torch.randn(2, 65, width, dtype=torch.float64)
        both = [
            gradients(build(name, width, heads, torch.float64, tokens=tokens, plain=plain), x)
            for plain in (False, True)
        ]
        for a, b in zip(*both, strict=True):
            assert_close(a, b, rtol=1e-10, atol=1e-12)
        modules[f"{name}, absorbed"] = layer
        modules[f"{name}, plain form"] = build(name, width, heads, torch.float32, tokens=tokens, plain=True)
    return modules


def run_once(module: nn.Module, x: Tensor, backward: bool) -> float:
    """Returns the milliseconds of one pass."""
    x = x.detach().requires_grad_(backward)
    start = time.perf_counter()
    with torch.set_grad_enabled(backward):
        out = module(x)
        if backward:
            out.backward(x.detach())
    elapsed = 1e3 * (time.perf_counter() - start)
    module.zero_grad()
    return elapsed


def measure(modules: dict[str, nn.Module], x: Tensor, backward: bool, repeats: int) -> dict[str, list[float]]:
    """Returns each candidate's milliseconds in each round, after one round that does not count."""
    times: dict[str, list[float]] = {name: [] for name in modules}
    for _ in range(repeats + 1):
        for name, module in modules.items():
            times[name].append(run_once(module, x, backward))
    return {name: t[1:] for name, t in times.items()}


def report(times: dict[str, list[float]]) -> None:
    """Prints the table, and the goals where absorbed and plain form were timed."""
    results = {name: quantiles(t, n=4) for name, t in times.items()}
    unit = results[PROJECTION][1]
    print(f"{'':28} {'median ms':>10} {'quartiles':>17} {'projections':>12}")
    for name, (low, median, high) in sorted(results.items(), key=lambda item: item[1][1]):
        print(f"{name:28} {median:10.1f} {f'{low:.1f} .. {high:.1f}':>17} {median / unit:11.2f}x")
    for name in [n.removesuffix(", absorbed") for n in results if n.endswith(", absorbed")]:
        absorbed, plain = results[f"{name}, absorbed"][1], results[f"{name}, plain form"][1]
        goals = (("at least 2x faster than plain", plain / absorbed, 2 * absorbed <= plain),
                 ("at most 3x one projection", absorbed / unit, absorbed <= 3 * unit))  # fmt: skip
        for goal, ratio, reached in goals:
            print(f"{name}, absorbed: {goal}: {ratio:.2f}x, {'reached' if reached else 'NOT reached'}")


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1025)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=11, help="rounds that count (default: 11)")
    parser.add_argument("--backward", action="store_true", help="time forward and backward")
    parser.add_argument("--mechanisms", nargs="*", help="registered names; default all. Pure needs heads x tokens^2 x "
                        "4 bytes several times over, 4 GB each at 64 heads and 4097 tokens")  # fmt: skip
    parser.add_argument("--imports", nargs="*", default=[], help="modules to import first")
    options = parser.parse_args(argv)
    for module in options.imports:
        import_module(module)
    modules = candidates(options.mechanisms or list_mechanisms(), options.width, options.heads, options.tokens)
    x = torch.randn(options.batch, options.tokens, options.width)
    print(
        f"{options.batch} x {options.tokens} tokens, width {options.width}, {options.heads} heads, float32, "
        f"{'forward + backward' if options.backward else 'forward'}, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}, {options.repeats} rounds"
    )
    report(measure(modules, x, options.backward, options.repeats))


if __name__ == "__main__":
    main()
