"""timm's own model tests on our mini models: `TIMM_TESTS=.../timm/tests pytest -m timm_contract`."""

import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

TIMM_TESTS = os.environ.get("TIMM_TESTS")
HERE = Path(__file__).parent
MINIS = ("vit_mini", "infvit_pure_mini", "infvit_linear_mini")
EXPECTED = {
    "test_model_forward",
    "test_model_backward",
    "test_model_default_cfgs_non_std",
    "test_model_forward_torchscript",
    "test_model_forward_intermediates_features",
    "test_model_forward_intermediates",
    "test_prune_intermediate_layers_contract",
    "test_model_forward_fx",
    "test_model_backward_fx",
    "test_model_forward_fx_torchscript",
}


@pytest.mark.timm_contract
@pytest.mark.slow
@pytest.mark.skipif(not TIMM_TESTS, reason="TIMM_TESTS is not set: path of the tests folder in timm's source")
def test_timms_model_tests_pass(tmp_path: Path):
    file = Path(TIMM_TESTS or "") / "test_models.py"
    assert file.is_file(), f"TIMM_TESTS={TIMM_TESTS} holds no test_models.py"
    report = tmp_path / "report.xml"
    paths = os.pathsep.join([str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", str(file), "-q", "-p", "timm_contract_plugin", "-p", "no:cacheprovider",
               "-c", os.devnull, "--rootdir", str(file.parent), "-k", "vit_mini or infvit", "--tb=short",
               "-W", "ignore", f"--junitxml={report}"]  # fmt: skip
    result = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    cases = [case for case in ElementTree.parse(report).iter("testcase") if case.find("skipped") is None]
    ran = {re.match(r"(\w+)\[(?:\d+-)?(\w+)", case.attrib["name"]).groups() for case in cases}
    assert {(name, mini) for name in EXPECTED for mini in MINIS} <= ran, sorted(ran)
    print(f"{len(cases)} of timm's tests passed")
