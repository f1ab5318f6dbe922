"""Tiles that small problems do not fit into."""

import pytest

from infvit.attention.kernels import pure_tiled


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(pure_tiled, "TILE", (4, 3))
    monkeypatch.setattr(pure_tiled, "WIDTH", 1)
    monkeypatch.setattr(pure_tiled, "SCORES", 24)
