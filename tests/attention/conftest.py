"""Imports what INFVIT_IMPORTS names, so that a mechanism from outside the package is tested by being registered.

INFVIT_IMPORTS=my_pkg.attention pytest tests/attention/test_attention_contract.py -k my_linear
"""

import os
from importlib import import_module

import pytest

from infvit.attention import mechanism

for module in filter(None, os.environ.get("INFVIT_IMPORTS", "").split(",")):
    import_module(module)


@pytest.fixture
def registry(monkeypatch):
    """A copy of the registry of mechanisms that is thrown away after the test."""
    copy = dict(mechanism._MECHANISMS)
    monkeypatch.setattr(mechanism, "_MECHANISMS", copy)
    return copy
