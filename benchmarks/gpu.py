"""What has to be measured on an NVIDIA GPU, in one command of under six minutes: `python benchmarks/gpu.py`.

1. The tests of the GPU kernels (`pytest tests/kernels`).
2. Pure InfSA's attention function against torch's flash kernel: bf16, 16 heads of 64 channels, 4096 to 16,384 tokens,
   forward and forward + backward, each checked against its reference first, then timed in turn.
3. Linear-4L against ViT-4L, fused and unfused, at 1024 px: images/s and J/image (`eval=efficiency`, in runs/gpu).
4. Whether Linear-4L takes an image of 9216 px.

It ends with one table of goals. The exit code is 0 if all of it could be measured, whatever came out.
"""

import argparse
import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from infvit.attention import AttentionLayer
from infvit.config import EfficiencyConfig, EvalConfig
from infvit.errors import UserError
from infvit.evaluation.efficiency import efficiency
from infvit.evaluation.efficiency.cells import Cell, Settings, Task
from infvit.evaluation.efficiency.check import check_layer
from infvit.evaluation.efficiency.worker import in_a_process
from infvit.metrics.timing import Latency, interleave, synchronizer
from infvit.reports.efficiency import write_efficiency

ROOT = Path(__file__).resolve().parents[1]
HEADS, HEAD_DIM = 16, 64
LINEAR, FUSED, UNFUSED = "infvit_linear_4l", "vit_4l", "vit_4l:unfused"
Goal = tuple[str, str, str]  # what, the goal, what was measured


def kernel_tests() -> Goal:
    """Runs the tests of the kernels and returns pytest's last line."""
    if not (ROOT / "tests" / "kernels").is_dir():
        return "pytest tests/kernels", "passes", "not there"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "tests/kernels"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150)
    except subprocess.TimeoutExpired:
        return "pytest tests/kernels", "passes", "not done after 150 s"
    lines = done.stdout.strip().splitlines()
    print("\n".join(lines[-15:]))
    return "pytest tests/kernels", "passes", lines[-1] if lines else f"exit code {done.returncode}"


def attention_pair(tokens: int, backward: bool, device: torch.device) -> tuple[dict[str, Latency], str]:
    """Times Pure InfSA and torch's flash kernel on the same q, k, v in turn.

    Returns:
        The latencies as `pure` and `flash`, and what the check of Pure found.
    """
    torch.manual_seed(0)
    layer = AttentionLayer(HEADS * HEAD_DIM, HEADS, mechanism="infsa_pure")
    found = check_layer(layer, tokens, device, torch.bfloat16, backward, 0.5 * torch.cuda.mem_get_info(device)[0])
    core = layer.core.to(device)
    shape = (1, HEADS, tokens, HEAD_DIM)
    q, k, v, gradient = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(4))
    for tensor in (q, k, v):
        tensor.requires_grad_(backward)

    def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v)

    def calling(function: Callable[..., Tensor]) -> Callable[[], Any]:
        def forward() -> Tensor:
            with torch.no_grad():
                return function(q, k, v)

        def both() -> tuple[Tensor, ...]:
            return torch.autograd.grad(function(q, k, v), (q, k, v), gradient)

        return both if backward else forward

    work = {"pure": calling(core), "flash": calling(flash)}
    latencies = interleave(work, rounds=50, warmup=10, seconds=8.0, synchronize=synchronizer(device))
    deviation = "NaN" if found.error is None else f"{found.error:.1e}"
    return latencies, f"{found.state}, deviation {deviation} at {found.tokens} tokens"


def attention_goals(device: torch.device, sizes: Sequence[int]) -> list[Goal]:
    """Returns the speed of Pure over flash, forward (goal 1.0) and forward + backward (goal 0.8)."""
    goals = []
    for backward, least in ((False, 1.0), (True, 0.8)):
        for tokens in sizes:
            what = f"Pure over flash, {'forward + backward' if backward else 'forward'}, {tokens} tokens"
            try:
                found, checked = attention_pair(tokens, backward, device)
            except torch.OutOfMemoryError:
                goals.append((what, f">= {least}x", "out of memory"))
                torch.cuda.empty_cache()
                continue
            ratio = found["flash"].median_ms / found["pure"].median_ms
            times = f"{found['pure'].median_ms:.3f} ms to {found['flash'].median_ms:.3f} ms"
            shown = f"{ratio:.2f}x ({times}; {checked})" if checked.startswith("right") else f"no ratio: {checked}"
            goals.append((what, f">= {least}x", shown))
    return goals


def model_goals(folder: Path) -> list[Goal]:
    """Measures the three models at 1024 px, batch 1 and 8, and returns their ratios."""
    asked = EfficiencyConfig(
        modes=["inference"], batch_sizes=[1, 8], baselines=[FUSED, UNFUSED], seconds=10.0, worker_minutes=1.5
    )
    config = EvalConfig(
        eval="efficiency", models=[FUSED, UNFUSED, LINEAR], resolutions=[1024], device="cuda", precision="bf16",
        output=str(folder), efficiency=asked,
    )  # fmt: skip
    try:
        rows = efficiency(config, report=write_efficiency)["rows"]
    except UserError as error:
        print(f"error: {error}")
        rows = json.loads((folder / "efficiency.json").read_text())["rows"]
    goals = []
    for batch in asked.batch_sizes:
        by_model = {row["model"]: row for row in rows if row["batch"] == batch}
        for base, least in ((UNFUSED, 3.0), (FUSED, 1.5)):
            ratio = by_model[LINEAR]["speedup"][base]
            shown = ratio if isinstance(ratio, str) else f"{ratio:.2f}x"
            goals.append((f"Linear-4L over {base}, 1024 px, batch {batch}, images/s", f">= {least}x", shown))
            ours, theirs = (by_model[name]["energy_j"] for name in (LINEAR, base))
            if isinstance(ratio, str):
                shown = ratio
            elif ours is None or theirs is None:
                shown = f"not measured: {by_model[LINEAR]['energy_reason'] or by_model[base]['energy_reason']}"
            else:
                shown = f"{theirs / ours:.2f}x ({theirs:.3f} J to {ours:.3f} J)"
            goals.append((f"Linear-4L over {base}, 1024 px, batch {batch}, J/image", f">= {least}x", shown))
    return goals


def largest_goal() -> Goal:
    """Lets Linear-4L take one image of 9216 px: 331,777 tokens."""
    task = Task("memory", [Cell(LINEAR, "inference", 9216)], Settings(device="cuda", precision="bf16"))
    found = in_a_process(task, minutes=1.0)
    shown = found.get("failed") or f"fits, {found['mib'] / 1024:.1f} GiB above the weights"
    return "Linear-4L, inference at 9216 px", "fits", shown


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures all of it and prints the table of goals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="*", default=[4096, 8192, 16384])
    parser.add_argument("--output", type=Path, default=Path("runs/gpu"))
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if not torch.cuda.is_available():
        print("error: there is no CUDA device here; nothing was measured.", file=sys.stderr)
        return 1
    device = torch.device("cuda", torch.cuda.current_device())
    start = time.monotonic()
    goals = [kernel_tests(), *attention_goals(device, options.tokens)]
    torch.cuda.empty_cache()
    goals += [*model_goals(options.output), largest_goal()]
    print(f"\n{torch.cuda.get_device_name(device)}, torch {torch.__version__}, {time.monotonic() - start:.0f} s\n")
    print("| what | goal | measured |\n|---|---|---|")
    print("\n".join(f"| {what} | {goal} | {shown} |" for what, goal, shown in goals))
    return 0


if __name__ == "__main__":
    sys.exit(main())
