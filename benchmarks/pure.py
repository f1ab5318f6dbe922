"""Times Pure InfSA alone against torch's fused softmax attention, and measures its memory: `python benchmarks/pure.py`.

Candidates run in turn, round after round, so that a change of the machine's load hits each of them alike: compare the
ratios. Memory is the growth of the process above its inputs, outputs included, in a fresh process each (Linux).
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median, quantiles

import torch
from torch import Tensor
from torch.nn import functional as F

from infvit.attention.pure import pure_infsa

Function = Callable[[Tensor, Tensor, Tensor], Tensor]
SHAPES = ("16x4096x64", "16x1025x64", "64x4096x16", "96x197x64")
PLAIN_SCORES = 2**25  # the plain form is timed up to this many
CANDIDATES: dict[str, Function] = {
    "fused softmax": F.scaled_dot_product_attention,
    "pure, tiled": lambda q, k, v: pure_infsa(q, k, v, path="tiled"),
    "pure, plain": lambda q, k, v: pure_infsa(q, k, v, path="plain"),
}


def inputs(shape: str) -> list[Tensor]:
    """Returns q, k, v and a gradient of the output for "HEADSxTOKENSxCHANNELS"."""
    torch.manual_seed(0)
    return [torch.randn(1, *map(int, shape.split("x"))) for _ in range(4)]


def run_once(function: Function, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, backward: bool) -> float:
    """Returns the milliseconds of one pass."""
    leaves = [x.detach().requires_grad_(backward) for x in (q, k, v)]
    start = time.perf_counter()
    out = function(*leaves)
    if backward:
        torch.autograd.grad(out, leaves, grad)
    return 1e3 * (time.perf_counter() - start)


def report_times(shape: str, backward: bool, repeats: int) -> None:
    """Prints medians, quartiles and the median of the ratios of each round, after one round that does not count.

    Two calls of one round meet the machine in the same state more often than two medians do.
    """
    given = inputs(shape)
    heads, tokens, _ = map(int, shape.split("x"))
    names = [name for name in CANDIDATES if "plain" not in name or heads * tokens**2 <= PLAIN_SCORES]
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(repeats + 1):
        for name in names:
            times[name].append(run_once(CANDIDATES[name], *given, backward))
    quartiles = {name: quantiles(t[1:], n=4) for name, t in times.items()}
    print(f"{shape}, {'forward + backward' if backward else 'forward'}")
    for name, (low, middle, high) in quartiles.items():
        ratio = median(x / y for x, y in zip(times[name][1:], times["fused softmax"][1:], strict=True))
        print(f"  {name:14} {middle:9.1f} ms  ({low:.1f} .. {high:.1f})  {ratio:.2f}x")


def peak_growth(shape: str, name: str, backward: bool) -> float:
    """Runs one pass and returns by how many MB the process grew at its largest."""
    given = inputs(shape)
    run_once(CANDIDATES[name], *(x[:, :1, :64].contiguous() for x in given), backward)  # libraries load their code
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    before = _status("VmRSS")
    run_once(CANDIDATES[name], *given, backward)
    return (_status("VmHWM") - before) / 1024


def _status(key: str) -> int:
    """Returns an entry of /proc/self/status in KB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def report_memory(shape: str, names: Sequence[str]) -> None:
    """Prints the growth for each candidate, forward and with backward, each in a process of its own."""
    result = inputs(shape)[0].numel() * 4 / 2**20
    print(f"{shape}, memory (results: {result:.0f} MB forward, {4 * result:.0f} MB with gradients)")
    for name in names:
        grown = [
            float(subprocess.check_output([sys.executable, __file__, "--peak", shape, name, str(backward)]))
            for backward in (0, 1)
        ]
        print(f"  {name:14} {grown[0]:7.0f} MB forward, {grown[1]:7.0f} MB forward + backward")


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=SHAPES, help=f"HEADSxTOKENSxCHANNELS (default: {SHAPES})")
    parser.add_argument("--repeats", type=int, default=7, help="rounds that count (default: 7)")
    parser.add_argument("--backward", action="store_true", help="time forward and backward")
    parser.add_argument("--memory", action="store_true", help="measure memory instead of time")
    parser.add_argument("--candidates", nargs="*", default=list(CANDIDATES), help="whose memory (default: all)")
    parser.add_argument("--peak", nargs=3, help=argparse.SUPPRESS)  # how the processes of --memory are called
    options = parser.parse_args(argv)
    if options.peak:
        print(peak_growth(options.peak[0], options.peak[1], bool(int(options.peak[2]))))
        return
    print(f"float32, {torch.get_num_threads()} threads, torch {torch.__version__}")
    for shape in options.shapes:
        if options.memory:
            report_memory(shape, options.candidates)
        else:
            report_times(shape, options.backward, options.repeats)


if __name__ == "__main__":
    main()
