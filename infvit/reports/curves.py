"""Learning curves of a run as one picture."""

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from infvit.engine.record import read_history


def draw_curves(folder: Path) -> None:
    """Draws loss, accuracy and learning rate over the epochs to `curves.png`.

    Args:
        folder: a run folder with `metrics.jsonl`.
    """
    rows = read_history(folder)
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    FigureCanvasAgg(figure)  # without pyplot: no global state, no display
    panels = figure.subplots(1, 3)
    lines = (
        (panels[0], "loss", (("train_loss", "training"), ("loss", "held-out"), ("ema_loss", "held-out, EMA"))),
        (panels[1], "top-1 (%)", (("top1", "raw weights"), ("ema_top1", "EMA weights"))),
        (panels[2], "learning rate", (("lr", "last update of the epoch"),)),
    )
    for axes, title, series in lines:
        for name, label in series:
            points = [(row["epoch"], row[name]) for row in rows if row.get(name) is not None]
            if points:
                axes.plot(*zip(*points, strict=True), marker="." if len(points) < 40 else "", label=label)
        axes.set(xlabel="epoch", title=title)
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(frameon=False)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.suptitle(folder.name)
    figure.savefig(folder / "curves.png", dpi=110)
