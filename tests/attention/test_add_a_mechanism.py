"""The worked example of docs/add-a-mechanism.md, run as it stands: a mechanism from outside the package."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
from torch.nn import functional as F

import infvit  # noqa: F401  # registers the models
from infvit import testing

ROOT = Path(__file__).resolve().parents[2]
CHECKS = [
    pytest.param(c, id=c.__name__, marks=[pytest.mark.slow] * (c is testing.check_compile)) for c in testing.CHECKS
]


@pytest.fixture
def package(tmp_path):
    """A folder with `my_pkg/attention.py` from the page's code block."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/add-a-mechanism.md").read_text(), re.DOTALL)
    (tmp_path / "my_pkg").mkdir()
    (tmp_path / "my_pkg/__init__.py").touch()
    (tmp_path / "my_pkg/attention.py").write_text(code)
    return tmp_path


@pytest.fixture
def my_linear(package, registry, monkeypatch):
    """The mechanism's name, registered for this test."""
    monkeypatch.syspath_prepend(package)
    for module in ("my_pkg", "my_pkg.attention"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    __import__("my_pkg.attention")
    return "my_linear"


def run(package, *command, **environment):
    """Runs Python in a fresh process with the package importable."""
    path = os.pathsep.join([str(package), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", **environment}
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("check", CHECKS)
def test_example_keeps_the_contract(my_linear, check):
    check(my_linear)


def test_example_without_its_mask_breaks_the_contract(package, request):
    file = package / "my_pkg/attention.py"
    code = file.read_text()
    masking = "k = torch.where(mask.keys[:, None, :, None], k, k.new_zeros(()))"
    assert masking in code
    file.write_text(code.replace(masking, "pass"))
    name = request.getfixturevalue("my_linear")
    with pytest.raises(AssertionError, match="not close"):
        testing.check_padding(name)


def test_example_refuses_what_it_says(my_linear):
    for arguments in ({"attn_drop_rate": 0.1}, {"eps": 0.0}):
        with pytest.raises(ValueError, match="must be"):
            timm.create_model("vit_mini", attention=my_linear, **arguments)


def test_example_trains_in_a_model(my_linear):
    model = timm.create_model("vit_mini", attention=my_linear, eps=1e-4, depth=2, num_classes=4)
    assert {block.attn.core.eps for block in model.blocks} == {1e-4}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    images, labels = torch.randn(8, 3, 32, 32), torch.arange(8) % 4
    losses = []
    for _ in range(10):
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.75 * losses[0]


@pytest.mark.slow
def test_our_suite_takes_in_a_mechanism_from_outside(package):
    suite = "tests/attention/test_attention_contract.py"
    code, out = run(package, "-m", "pytest", "-p", "no:cacheprovider", suite, "-k", "my_linear and (padding or causal)",
                    INFVIT_IMPORTS="my_pkg.attention")  # fmt: skip
    assert code == 0, out
    assert "2 passed" in out


@pytest.mark.slow
def test_command_of_the_page_checks_the_example(package):
    code, out = run(package, "-m", "infvit.testing", "my_linear", "--imports", "my_pkg.attention")
    assert code == 0, out
    assert out.count(": ok") == len(testing.CHECKS)


@pytest.mark.slow
def test_command_of_the_page_trains_the_example(package, tmp_path):
    command = "train.py model=vit_mini model.attention=my_linear imports=[my_pkg.attention] +model.args.eps=1e-4"
    assert command.split(" +")[0] in (ROOT / "docs/add-a-mechanism.md").read_text().replace("'", "")
    code, out = run(package, *command.split(), "dry_run=true", f"run_dir={tmp_path / 'run'}")
    assert code == 0, out
    assert "my_linear" in out
