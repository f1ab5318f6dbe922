"""A transformer block of one's own with InfSA in it, trained to find the brightest token of each sequence.

    python examples/block.py

Every token predicts whether it is the brightest, which it can only know from the others. A few seconds on a CPU.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import infvit


class Block(nn.Module):
    """Pre-norm block with Pure InfSA where nn.MultiheadAttention would stand."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = infvit.InfSAAttention(width, heads, batch_first=True, gamma=0.7)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, key_padding_mask=padding, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


def main(steps: int = 150) -> dict[str, float]:
    """Trains and returns loss at the start and the end."""
    torch.manual_seed(0)
    embed, block, head = nn.Linear(1, 32), Block(), nn.Linear(32, 1)
    parameters = [*embed.parameters(), *block.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=3e-3)
    losses = []
    for _ in range(steps):
        brightness = torch.rand(64, 12, 1)
        scores = head(block(embed(brightness)))[..., 0]
        loss = F.cross_entropy(scores, brightness[..., 0].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    found = {"first loss": losses[0], "last loss": losses[-1], "gamma": block.attention.rho}
    print(found)
    return found


if __name__ == "__main__":
    main()
