"""A small Llama with Pure InfSA, trained on the characters of a text file, then asked to go on with a text.

    pip install 'infvit[hf]'; python examples/llama_text.py [--text FILE] [--steps 100]

The default text is this repository's README. Causality holds through the norm: changing a later character changes no
earlier prediction.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import infvit

ROOT = Path(__file__).resolve().parents[1]
LENGTH = 64


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Trains, generates, and returns the losses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, default=ROOT / "README.md")
    parser.add_argument("--steps", type=int, default=100)
    given = parser.parse_args(arguments)
    torch.manual_seed(0)
    text = given.text.read_text()
    letters = sorted(set(text))
    data = torch.tensor([letters.index(letter) for letter in text])
    config = LlamaConfig(
        vocab_size=len(letters), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2 * LENGTH, pad_token_id=None, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    model = infvit.convert(LlamaForCausalLM(config), "infsa_pure")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(given.steps):
        starts = torch.randint(len(data) - LENGTH, (16,))
        batch = torch.stack([data[start : start + LENGTH] for start in starts])
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    start = data[None, :16]
    with torch.no_grad():
        going_on = model.generate(start, max_new_tokens=32, do_sample=False)[0]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {given.steps} steps")
    print(repr("".join(letters[i] for i in going_on)))
    return {"first loss": losses[0], "last loss": losses[-1]}


if __name__ == "__main__":
    main()
