"""Measures Linear InfSA on a CPU against its goals: `python benchmarks/linear.py` prints every figure.

Times are those of whole branches: the attention with its projections, and the block (norms and residual sums included).
What is compared runs in turn, round after round in one process, so that a change of the machine's load hits all alike;
a ratio is the median of those of each round. Memory is the peak resident memory of fresh processes.
"""

import argparse
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from statistics import median

import torch
from attention import build, measure
from timm.layers import Mlp
from timm.models.vision_transformer import Block
from torch import Tensor, nn

WIDTH, HEADS = 1024, 64
LENGTHS = {17: (1, 41), 65: (1, 41), 197: (8, 11), 1025: (2, 11), 4097: (1, 11)}
"""Batch and rounds by the number of tokens."""
GROWTH = (1025, 16385)
MEMORY_TOKENS, MEMORY_WIDTH, MEMORY_HEADS = 331777, 256, 16
REQUIRED_AND_GOAL = {
    ("projection", 197): (1.63, 1.5),
    ("projection", 4097): (1.34, 1.25),
    ("training", 197): (1.6, 1.4),
    ("training", 1025): (1.6, 1.4),
    ("training", 4097): (1.6, 1.4),
    ("softmax", 17): (1.0, 1.0),
    ("softmax", 65): (1.0, 1.0),
    ("softmax", 197): (0.29, 0.27),
    ("softmax", 1025): (0.16, 0.15),
    ("softmax", 4097): (0.051, 0.051),
    ("block", 197): (1.10, 1.10),
    ("block", 1025): (1.10, 1.10),
    ("block", 4097): (1.05, 1.05),
    ("growth", 16385): (18.0, 18.0),
    ("memory", "branch"): (4.0, 4.0),
    ("memory", "block"): (7.5, 7.5),
}


class Floor(nn.Module):
    """One projection, then the MLP: what a block with any attention at all must do to each token."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(WIDTH, WIDTH)
        self.mlp = Mlp(WIDTH, 4 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.projection(x))


def block(width: int, heads: int) -> Block:
    """Returns timm's block around Linear InfSA."""
    result = Block(width, heads)
    result.attn = build("infsa_linear", width, heads, torch.float32)
    return result


def verdict(kind: str, size: int | str, value: float) -> str:
    """Returns a figure with what is required of it, and the goal."""
    if (kind, size) not in REQUIRED_AND_GOAL:
        return f"{value:.3f}"
    required, goal = REQUIRED_AND_GOAL[kind, size]
    word = "goal reached" if value <= goal else "required reached" if value <= required else "NOT reached"
    return f"{value:.4f} (required {required}, goal {goal}: {word})"


def ratio(kind: str, tokens: int, modules: dict[str, nn.Module], backward: bool = False) -> None:
    """Times the first of two modules against the other and prints the ratio, judged."""
    batch, rounds = LENGTHS[tokens]
    times = measure(modules, torch.randn(batch, tokens, WIDTH), backward, rounds)
    (first, other), (a, b) = times, (median(t) for t in times.values())
    judged = verdict(kind, tokens, median(x / y for x, y in zip(*times.values(), strict=True)))
    print(f"{batch} x {tokens:5}  {first} {a:.1f} ms / {other} {b:.1f} ms: {judged}", flush=True)


def times_of_branches() -> None:
    """Forward, and forward + backward, against one projection and against torch's fused softmax."""
    linear, softmax = (build(name, WIDTH, HEADS, torch.float32) for name in ("infsa_linear", "softmax"))
    projection = nn.Linear(WIDTH, WIDTH)
    print("attention branch, forward")
    for tokens in LENGTHS:
        ratio("projection", tokens, {"Linear": linear, "one projection": projection})
        ratio("softmax", tokens, {"Linear": linear, "softmax": softmax})
    print("attention branch, forward + backward")
    for tokens in (197, 1025, 4097):
        ratio("training", tokens, {"Linear": linear, "one projection": projection}, backward=True)


def times_of_blocks() -> None:
    """The whole block against its floor."""
    print("block (norms, attention, MLP, residual sums) against MLP + one projection, forward")
    for tokens in (197, 1025, 4097):
        ratio("block", tokens, {"block": block(WIDTH, HEADS), "floor": Floor()})


def growth() -> None:
    """How time grows with the number of tokens."""
    linear = build("infsa_linear", WIDTH, HEADS, torch.float32)
    times: list[list[float]] = [[], []]
    for _ in range(3):
        for each, tokens in zip(times, GROWTH, strict=True):
            each += measure({"linear": linear}, torch.randn(1, tokens, WIDTH), False, 3)["linear"]
    short, long = map(median, times)
    print(f"growth, {GROWTH[0]} to {GROWTH[1]} tokens ({GROWTH[1] / GROWTH[0]:.1f}x): {short:.1f} to {long:.1f} ms, "
          f"{verdict('growth', GROWTH[1], long / short)}")  # fmt: skip


def use_memory(what: str, tokens: int) -> None:
    """Runs forward and backward once and prints the peak resident memory of this process, in GB."""
    module = block(MEMORY_WIDTH, MEMORY_HEADS) if what == "block" else \
        build("infsa_linear", MEMORY_WIDTH, MEMORY_HEADS, torch.float32)  # fmt: skip
    x = torch.randn(1, tokens, MEMORY_WIDTH, requires_grad=True)
    module(x).sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9)


def memory() -> None:
    """Peak resident memory of a training step in fresh processes, at two lengths: it grows no faster than they do."""
    print(
        f"peak resident memory of forward + backward in a fresh process, width {MEMORY_WIDTH}, {MEMORY_HEADS} heads, GB"
    )
    for what in ("branch", "block"):
        used = {}
        for tokens in (MEMORY_TOKENS // 4, MEMORY_TOKENS):
            command = [sys.executable, os.path.abspath(__file__), "--use-memory", what, "--tokens", str(tokens)]
            used[tokens] = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        print(f"{what:6}  {MEMORY_TOKENS // 4} tokens {used[MEMORY_TOKENS // 4]:.2f}, {MEMORY_TOKENS} tokens "
              f"{verdict('memory', what, used[MEMORY_TOKENS])}", flush=True)  # fmt: skip


PARTS = {"branches": times_of_branches, "blocks": times_of_blocks, "growth": growth, "memory": memory}


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=list(PARTS), help=f"default: {' '.join(PARTS)}")
    parser.add_argument("--use-memory", choices=("branch", "block"), help=argparse.SUPPRESS)
    parser.add_argument("--tokens", type=int, default=MEMORY_TOKENS, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.use_memory:
        use_memory(options.use_memory, options.tokens)
        return
    if unknown := set(options.parts) - PARTS.keys():
        parser.error(f"unknown: {', '.join(unknown)}; choose from {', '.join(PARTS)}")
    torch.manual_seed(0)
    print(f"width {WIDTH}, {HEADS} heads, float32, {torch.get_num_threads()} threads, torch {torch.__version__}")
    for name in options.parts:
        PARTS[name]()


if __name__ == "__main__":
    main()
