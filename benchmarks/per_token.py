"""What attention without an output of its own for each token costs: sequences to reverse and to shift.

    python benchmarks/per_token.py [--symbols 16] [--steps 1500] [--seeds 0 1 2]

A `torch.nn.TransformerEncoder`, converted by `infvit.convert`, learns to put out a random sequence backwards, or moved
on by one: each output needs the symbol of one other place. Prints the share of symbols that are right on new ones.
"""

import argparse
import sys
from collections.abc import Sequence
from statistics import fmean, stdev

import torch
from torch import Tensor, nn

import infvit

TASKS = {"reverse": lambda x: x.flip(1), "shift": lambda x: x.roll(1, 1)}
MECHANISMS = ("softmax", "infsa_pure", "infsa_linear")
WIDTH, HEADS, LAYERS, ALPHABET, BATCH = 64, 4, 2, 16, 128


class Labeler(nn.Module):
    """Symbols and places in, a symbol for each place out."""

    def __init__(self, symbols: int) -> None:
        super().__init__()
        self.symbol, self.place = nn.Embedding(ALPHABET, WIDTH), nn.Embedding(symbols, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, ALPHABET)

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits, (B, N, ALPHABET), for symbols (B, N)."""
        return self.head(self.encoder(self.symbol(x) + self.place.weight))


def accuracy(task: str, mechanism: str, symbols: int, steps: int, seed: int) -> float:
    """Trains one model and returns the share of symbols that are right on 1,000 new sequences."""
    torch.manual_seed(seed)
    model: nn.Module = Labeler(symbols)
    if mechanism != "softmax":
        model = infvit.convert(model, mechanism, inplace=True)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, steps)
    for _ in range(steps):
        x = torch.randint(ALPHABET, (BATCH, symbols))
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), TASKS[task](x).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    x = torch.randint(ALPHABET, (1000, symbols))
    with torch.no_grad():
        return float((model.eval()(x).argmax(-1) == TASKS[task](x)).float().mean())


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--symbols", type=int, default=16)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    options = parser.parse_args(arguments)
    print(f"| {options.symbols} symbols | {' | '.join(MECHANISMS)} |")
    print("|---" * (len(MECHANISMS) + 1) + "|")
    for task in TASKS:
        cells = []
        for mechanism in MECHANISMS:
            found = [accuracy(task, mechanism, options.symbols, options.steps, seed) for seed in options.seeds]
            cells.append(f"{fmean(found):.2f}" + (f" ± {stdev(found):.2f}" if len(found) > 1 else ""))
            print(f"{task}, {mechanism}: {', '.join(f'{share:.3f}' for share in found)}", file=sys.stderr)
        print(f"| {task} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
