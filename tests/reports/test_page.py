"""The page of all runs: by itself, as it is written and as Chromium shows it."""

import html
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from infvit import report
from infvit.reports.svg import ticks

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
SCORES = {"b": [50.0, 9.5], "c": [60.0, 97.0], "a": [55.0, 80.25]}


@pytest.fixture
def page(tmp_path: Path, run_folder: Callable[..., Path]) -> Path:
    """Three runs, one with a figure and one with signs that mean something in HTML, and a job that failed early."""
    for name, scores in SCORES.items():
        run_folder(tmp_path / "runs" / name, ["seed=1"], scores)
    run_folder(tmp_path / "runs" / "d", ["seed=2"], state="failed", error="<script>alert('&')</script>")
    Image.new("RGB", (40, 30), "red").save(tmp_path / "runs" / "a" / "curves.png")
    assert report.main([str(tmp_path / "runs"), "--html", str(tmp_path / "out" / "page.html")]) == 0
    return tmp_path / "out" / "page.html"


class Links(HTMLParser):
    """Collects what a page refers to, and its texts."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.points: dict[str, list[str]] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.links += [value for name in ("src", "href", "srcset", "action") if (value := values.get(name))]
        if tag == "polyline":
            self.points.setdefault(str(values["data-run"]), []).append(str(values["points"]))


def test_it_refers_to_nothing_outside(page: Path) -> None:
    text = page.read_text()
    parser = Links()
    parser.feed(text)
    assert len(parser.links) == 2
    assert all(link.startswith("data:") for link in parser.links)
    assert not re.search(r"https?://|@import|url\(|fetch\(|XMLHttp|WebSocket", text)
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert" in text
    assert [path.name for path in page.parent.iterdir()] == ["page.html"]


def test_the_curves_are_the_rows(page: Path) -> None:
    """The first chart is top-1: the heights of its points are the scores, on one scale for all runs."""
    parser = Links()
    parser.feed(page.read_text())
    order = sorted(SCORES)  # the order of the folders
    heights, scores = [], []
    for number, name in enumerate(order):
        first = parser.points[str(number)][0]
        heights += [float(point.split(",")[1]) for point in first.split()]
        scores += SCORES[name]
    slope, shift = np.polyfit(scores, heights, 1)
    assert slope < 0, "upwards"
    assert np.abs(slope * np.array(scores) + shift - heights).max() < 0.1
    assert {len(lines) for lines in parser.points.values()} == {4}, "top-1, two losses, learning rate"


def test_cells_hold_what_they_are_sorted_by(page: Path) -> None:
    text = page.read_text()
    for row in text.split("<tr data-run")[1:4]:
        keys = [json.loads(html.unescape(key)) for key in re.findall('data-key="([^"]*)"', row)]
        assert keys[:5] == [keys[0], "done", "infvit_linear_mini", "digits", 1]
        assert keys[6] == SCORES[keys[0]][-1]
    assert 'class="failed"' in text


def test_it_is_written_again_and_again(
    page: Path, tmp_path: Path, run_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The browser reads it anew as often; a run that begins meanwhile is on it; Ctrl-C ends it."""
    waits = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            raise KeyboardInterrupt
        run_folder(tmp_path / "runs" / "late", ["seed=1"], [70.0])

    monkeypatch.setattr(report.time, "sleep", sleep)
    assert report.main([str(tmp_path / "runs"), "--html", str(page), "--every", "5"]) == 130
    assert waits == [5.0, 5.0]
    assert '<meta http-equiv="refresh" content="5">' in page.read_text()
    assert ">late<" in page.read_text()


@pytest.mark.parametrize(
    ("low", "high", "whole", "expected"),
    [
        (0, 1, False, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (9.5, 97, False, [0, 20, 40, 60, 80, 100]),
        (1, 300, True, [100, 200, 300]),
        (1, 2, True, [1, 2]),
        (3, 3, True, [3]),
        (-0.5, 0.5, False, [-0.6, -0.4, -0.2, 0, 0.2, 0.4, 0.6]),
    ],
)
def test_ticks(low: float, high: float, whole: bool, expected: list[float]) -> None:
    assert ticks(low, high, whole) == pytest.approx(expected)


def chromium(*arguments: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """Runs Chromium without a display, and without a network to go to."""
    assert CHROMIUM is not None
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--enable-logging=stderr",
               "--virtual-time-budget=3000", "--proxy-server=127.0.0.1:9")  # fmt: skip
    options += (f"--user-data-dir={folder}/profile",)
    return subprocess.run([CHROMIUM, *options, *arguments], capture_output=True, text=True, timeout=120, check=True)


@pytest.mark.slow
@needs_chromium
def test_chromium_shows_it(page: Path, tmp_path: Path) -> None:
    shot = tmp_path / "shot.png"
    ended = chromium("--window-size=1200,1400", f"--screenshot={shot}", page.as_uri(), folder=tmp_path)
    assert ":CONSOLE" not in ended.stderr, ended.stderr
    pixels = np.asarray(Image.open(shot).convert("RGB")).astype(int)
    assert pixels.shape[:2] == (1400, 1200)
    assert (pixels.min(axis=2) < 128).mean() > 0.003, "text"
    for color in ((0x44, 0x77, 0xAA), (0xEE, 0x66, 0x77), (0x22, 0x88, 0x33)):
        assert (np.abs(pixels - color).max(axis=2) < 12).sum() > 60, f"the curve in {color}"


@pytest.mark.slow
@needs_chromium
@pytest.mark.parametrize(("column", "clicks", "order"), [
    (0, 1, "abcd"), (0, 2, "dcba"), (6, 1, "bacd"), (6, 2, "cabd"), (4, 1, "abcd"),
])  # fmt: skip
def test_the_table_sorts(page: Path, tmp_path: Path, column: int, clicks: int, order: str) -> None:
    """By number, not by letter (9.50 before 80.25), and what has no number stays last."""
    script = f"""<script>
    const button = document.querySelectorAll("#runs th button")[{column}];
    for (let i = 0; i < {clicks}; i++) button.click();
    document.querySelectorAll("#runs tbody tr")[0].click();
    </script></body>"""
    clicked = page.with_name("clicked.html")
    clicked.write_text(page.read_text().replace("</body>", script))
    ended = chromium("--dump-dom", clicked.as_uri(), folder=tmp_path)
    assert ":CONSOLE" not in ended.stderr, ended.stderr
    rows = re.findall(r'<tr data-run="(\d)" class="([\w ]+)"', ended.stdout)
    assert "".join("abcd"[int(number)] for number, _ in rows) == order
    assert ["dim" in classes for _, classes in rows] == [False, True, True, True], "the first was clicked"
    kept = "abcd".index(order[0])
    lines = re.findall(r'<polyline data-run="(\d)"[^>]*?(?:class="(\w*)")?>', ended.stdout)
    assert all((css == "dim") == (int(number) != kept) for number, css in lines)


@pytest.mark.slow
@needs_chromium
def test_the_check_of_the_console_sees_an_error(page: Path, tmp_path: Path) -> None:
    broken = page.with_name("broken.html")
    broken.write_text(page.read_text().replace("</body>", "<script>nothing.here();</script></body>"))
    assert ":CONSOLE" in chromium("--dump-dom", broken.as_uri(), folder=tmp_path).stderr
