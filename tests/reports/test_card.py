"""The card of a trained run, and its model as timm loads it from a folder."""

from pathlib import Path

import pytest
import timm
import torch
import yaml

from infvit import report
from infvit.config import DataConfig, ModelConfig, RecipeConfig, TrainConfig
from infvit.engine import train
from infvit.evaluation.rebuild import rebuild
from infvit.reports import card, draw_curves
from infvit.reports.runs import read_run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    model = ModelConfig("infvit_linear_mini", gamma=0.4, args={"depth": 1, "embed_dim": 24, "num_heads": 2})
    data = DataConfig("digits", img_size=16, num_workers=0, mean=[0.5] * 3, std=[0.25] * 3)
    recipe = RecipeConfig("tiny", lr=1e-2, warmup_epochs=0, mixup=0, cutmix=0, repeated_aug=1, ema_decay=0.5,
                          crop_pct=1.0, auto_augment=None)  # fmt: skip
    train(TrainConfig(model, data, recipe, epochs=2, batch_size=128, run_dir=str(folder)), after_epoch=[draw_curves])
    return folder


def test_the_card(trained: Path, capsys: pytest.CaptureFixture) -> None:
    (trained / "map.png").write_bytes((trained / "curves.png").read_bytes())
    (trained / "eval_accuracy_raw.json").write_text('{"top1": 12.3456789, "images": 360, "none": null}')
    assert report.main([str(trained)]) == 0
    assert str(trained / "README.md") in capsys.readouterr().out
    text, run = (trained / "README.md").read_text(), read_run(trained)
    front = yaml.safe_load(text.split("---")[1])
    assert (front["library_name"], front["pipeline_tag"]) == ("timm", "image-classification")
    assert "# infvit_linear_mini trained on digits" in text
    best = max(run.series("top1"), key=lambda point: (point[1], -point[0]))
    assert f"| top-1 (%) | {run.last('top1'):.2f} | {best[1]:.2f} (epoch {best[0]}) |" in text
    least = min(run.series("loss"), key=lambda point: point[1])
    assert f"| loss | {run.last('loss'):.4f} | {least[1]:.4f} (epoch {least[0]}) |" in text
    assert "| epochs | 2 of 2, done |" in text
    assert "| top1 | 12.3457 |" in text
    assert text.index("![curves](curves.png)") < text.index("![map](map.png)")
    model = rebuild(str(trained), "raw", {}).model
    assert f"| parameters | {sum(p.numel() for p in model.parameters()):,} |" in text
    stored = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])
    assert stored == run.config
    assert "Published" not in text, "another model on other data"


def test_the_call_on_the_card_works(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = card.card_text(trained).split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(trained)
    names: dict = {}
    exec(code, names)
    expected = rebuild(str(trained), "raw", {}).model.state_dict()
    found = names["model"].state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize("weights", ["raw", "ema"])
def test_timm_loads_what_is_exported(trained: Path, tmp_path: Path, weights: str) -> None:
    """The same function, with its preprocessing, class names and card."""
    assert report.main([str(trained), "--export", str(tmp_path / "hub"), "--weights", weights]) == 0
    loaded = timm.create_model(f"local-dir:{tmp_path / 'hub'}", pretrained=True).eval()
    images = torch.randn(4, 3, 16, 16)
    expected = rebuild(str(trained), weights, {}).model
    other = rebuild(str(trained), "raw" if weights == "ema" else "ema", {}).model
    with torch.no_grad():
        assert torch.equal(loaded(images), expected(images))
        assert not torch.equal(loaded(images), other(images))
    config = timm.data.resolve_model_data_config(loaded)
    found = [tuple(config[name]) for name in ("input_size", "mean", "std")]
    assert found == [(3, 16, 16), (0.5,) * 3, (0.25,) * 3]
    assert config["crop_pct"] == 1.0
    assert loaded.pretrained_cfg["label_names"] == [str(digit) for digit in range(10)]
    assert "# infvit_linear_mini trained on digits" in (tmp_path / "hub" / "README.md").read_text()
    assert (tmp_path / "hub" / "curves.png").exists()


def test_what_is_pushed(trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """What timm's helper is given is what --export saves; a refusal of the hub is one line."""
    given: dict = {}

    def helper(model, repository, **settings):
        given.update(settings, model=model, repository=repository)
        return "somewhere"

    monkeypatch.setattr(card, "push_to_hf_hub", helper)
    assert report.main([str(trained), "--push", "me/mine"]) == 0
    assert "somewhere" in capsys.readouterr().out
    assert (given["repository"], given["safe_serialization"]) == ("me/mine", True)
    assert given["model_args"]["gamma"] == 0.4
    readme = timm.models._hub.generate_readme(given["model_card"], "mine")
    assert "## Scores" in readme
    assert "![" not in readme, "the helper takes no figures"

    def refuse(*args, **kwargs):
        raise RuntimeError("401\nunauthorized")

    monkeypatch.setattr(card, "push_to_hf_hub", refuse)
    assert report.main([str(trained), "--push", "me/mine"]) == 1
    assert capsys.readouterr().err.startswith("error: --push me/mine: 401 unauthorized")


def test_what_has_no_card_or_model(tmp_path: Path, run_folder, capsys: pytest.CaptureFixture) -> None:
    never = run_folder(tmp_path / "never", ["seed=1"], state="failed")
    started = run_folder(tmp_path / "started", [], [50.0, 60.0], None)
    assert report.main([str(never)]) == 1
    assert "holds no run with a config.yaml" in capsys.readouterr().err
    assert report.main([str(started), "--export", str(tmp_path / "hub")]) == 1
    assert "holds no best.pt" in capsys.readouterr().err
    assert report.main([str(started)]) == 0
    assert "create_model" not in (started / "README.md").read_text()


def test_the_published_figure_stands_beside_the_same_model(tmp_path: Path, run_folder) -> None:
    run_folder(tmp_path / "run", [], [80.0, 84.0], None, model="infvit_pure_4l", data="imagenet")
    assert "Published for this model: top-1 85.1 %" in card.card_text(tmp_path / "run")


@pytest.mark.parametrize(
    ("model", "data", "options", "published"),
    [
        ("infvit_linear_4l", "imagenet", {}, "84.7 % on ImageNet-1K (arXiv 2603.00175)"),
        ("infvit_linear_4l", "digits", {}, None),
        ("infvit_linear_4l", "imagenet", {"classes": "imagenet100"}, None),
        ("infvit_linear_4l", "imagenet", {"gamma": 0.3}, None),
        ("infvit_linear_4l", "imagenet", {"args": {"depth": 3}}, None),
        ("deit_small_agf", "imagenet", {}, "80.3 % on ImageNet-1K (arXiv 2505.08516)"),
        ("deit_small_agf", "imagenet", {"classes": "imagenet100"}, "81.3 % on imagenet100 (arXiv 2505.08516)"),
        ("deit_small_patch16_224", "imagenet", {"classes": "imagenet100"}, "80.6 % on imagenet100"),
        ("deit_small_patch16_224", "imagenet", {"convert": "infsa_pure"}, None),
    ],
)
def test_a_published_figure_is_that_of_the_same_model_and_data(
    model: str, data: str, options: dict, published: str | None, tmp_path: Path, run_folder
) -> None:
    folder = run_folder(tmp_path / "run", [], [80.0, 84.0], None, model=model, data=data)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    for key, value in options.items():
        config["data" if key == "classes" else "model"][key] = value
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    text = card.card_text(folder)
    assert (f"Published for this model: top-1 {published}" in text) if published else "Published for" not in text
