"""Every file of `configs/` composes into a valid configuration; wrong types and unknown keys are one clear error."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import timm
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from infvit import cli
from infvit.config import EvalConfig, TrainConfig, leaf_keys
from infvit.errors import ConfigError, UserError

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
FILES = [(path.parent.name, path.stem) for path in sorted(CONFIGS.glob("*/*.yaml"))]

cli.register_configs(["model=timm/NAME"])
TIMM = ConfigStore.instance().repo["model"]["timm"]
SOME = ("resnet18", "infvit_pure_4l")


@pytest.fixture(autouse=True)
def hydra(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "argv", [str(CONFIGS.parent / "train.py")])
    # Hydra copies all that is registered; without most of timm's models the tests are several times faster.
    repository = ConfigStore.instance().repo["model"]
    monkeypatch.setitem(repository, "timm", {f"{name}.yaml": TIMM[f"{name}.yaml"] for name in SOME})
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        yield


def build(*overrides: str) -> TrainConfig:
    """Composes and converts as `train.py` does, errors included."""
    try:
        return cli.from_hydra(compose("train", list(overrides)), TrainConfig)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(cli.explain(error)) from error


def test_groups_are_the_folders():
    assert {*cli.GROUPS, "hydra"} == {path.name for path in CONFIGS.iterdir() if path.is_dir()}
    assert {"model", "data", "recipe", "engine", "logger", "experiment"} == {group for group, _ in FILES}


@pytest.mark.parametrize(("group", "name"), FILES)
def test_every_file_composes(group: str, name: str):
    config = build(f"{group}={name}")
    assert isinstance(config, TrainConfig)
    if name.startswith("ablation_agf_"):
        assert (config.data.name, config.model.name) == ("digits", "agf_mini")
    elif name.startswith("ablation_"):
        assert (config.data.name, config.model.gamma_trainable) == ("digits", False)
    elif group == "experiment":
        assert (config.data.name, config.recipe.name, config.epochs) == ("imagenet", "deit", 300)
        assert name in (f"{config.model.name}_imagenet", "agf_imagenet", "agf_imagenet100")
        assert config.data.classes == ("imagenet100" if name.endswith("100") else None)
        assert config.batch_size == 1024
    elif group in ("model", "data", "recipe"):
        assert getattr(config, group).name == name


def test_defaults():
    config = build()
    assert (config.model.name, config.data.name, config.recipe.name) == ("infvit_linear_mini", "digits", "quick")
    assert (config.epochs, config.batch_size, config.logger.wandb) == (60, 32, False)
    assert config.recipe.opt_betas == [0.9, 0.999]
    assert type(config.recipe.opt_betas) is list
    assert type(config.model.args) is dict


def test_model_files_name_registered_models():
    assert {name for group, name in FILES if group == "model"} <= set(timm.list_models())
    assert {name for name in timm.list_models() if name in ("vit_4l", "infvit_pure_24l", "infvit_linear_mini")} <= {
        name for group, name in FILES if group == "model"
    }


def test_any_model_of_timm():
    assert {name.removesuffix(".yaml") for name in TIMM} == set(timm.list_models())
    assert build("model=timm/resnet18").model.name == "resnet18"
    assert build("model=timm/infvit_pure_4l", "model.gamma=0.5").model.gamma == 0.5
    assert build("model.name=my_own_model").model.name == "my_own_model"


def test_arguments_of_a_model():
    assert build("+model.args.depth=2", "+model.args.pos_embed=none").model.args == {"depth": 2, "pos_embed": "none"}
    assert build("model.args.depth=2", "model.args.norm_layer=null").model.args == {"depth": 2, "norm_layer": None}
    assert build("model.args={depth: 2}").model.args == {"depth": 2}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("+x=1", "unknown key 'x'."),
        ("+data.rooot=/x", "unknown key 'data.rooot'. Did you mean 'data.root'"),
        ("+engine.precison=bf16", "unknown key 'engine.precison'. Did you mean 'engine.precision'"),
        ("+recipe.opt_betas.x=1", "+recipe.opt_betas.x=1: Index 'x' (str) is not an int."),
        ("epohcs=3", "unknown key 'epohcs'. Did you mean 'epochs'"),
        ("data.rooot=/x", "unknown key 'data.rooot'. Did you mean 'data.root'"),
        ("mdel=vit_mini", "unknown key 'mdel'. Did you mean 'model'"),
        ("model=infvit_linear_mimi", "unknown model=infvit_linear_mimi. Did you mean 'infvit_linear_mini'"),
        ("model=timm/resnt18", "unknown model=timm/resnt18. Did you mean 'timm/resnet18'"),
        ("recipe=diet", "unknown recipe=diet. Did you mean 'deit'?"),
        ("data=digit", "unknown data=digit. Did you mean 'digits'"),
        ("experiment=none_like_it", "unknown experiment=none_like_it. "),
        ("epochs=abc", "epochs=abc: Value 'abc' of type 'str' could not be converted to Integer."),
        ("epochs=1.5", "epochs=1.5: Value '1.5' of type 'float' could not be converted to Integer."),
        ("epochs=null", "epochs"),
        ("recipe.lr=fast", "recipe.lr=fast: Value 'fast' of type 'str' could not be converted to Float."),
        ("compile=perhaps", "compile=perhaps: Value 'perhaps' is not a valid bool (type str)."),
        ("data.mean=3", "data.mean=3: "),
        ("data.mean=[a]", "data.mean"),
        ("run_dir=${nothing}", "run_dir: Interpolation key 'nothing' not found"),
        ("run_dir=a=b", """cannot read 'run_dir=a=b'"""),
        ("epochs", "cannot read 'epochs'"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(override: str, message: str):
    with pytest.raises(UserError) as caught:
        build(override)
    text = str(caught.value)
    assert text.startswith(message)
    assert "\n" not in text
    assert "full_key" not in text
    assert "object_type" not in text


def test_keys_of_eval_are_offered_in_eval(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/eval.py"])
    with pytest.raises(HydraException) as caught:
        compose("eval", ["checkpoin=x"])
    assert cli.explain(caught.value).startswith("unknown key 'checkpoin'. Did you mean 'checkpoint'?")


def test_eval_composes():
    config = cli.from_hydra(compose("eval", ["checkpoint=x", "data.img_size=48", "+data.val_split=v2"]), EvalConfig)
    assert (config.checkpoint, config.data, config.eval) == ("x", {"img_size": 48, "val_split": "v2"}, ["accuracy"])


def test_leaf_keys():
    keys = leaf_keys(TrainConfig)
    assert {"epochs", "model.args", "data.root", "recipe.lr", "engine.precision", "logger.wandb"} <= set(keys)
    assert not {"model", "data", "recipe"} & set(keys)
    assert len(keys) == len(set(keys))


# The vocabulary that is promised; new keys may come, these may not go.
PROMISED = """epochs max_steps batch_size seed deterministic run_dir fresh dry_run debug compile profile imports
init_from reset_head data.root data.num_workers data.micro_batch_size data.img_size engine.precision
engine.grad_checkpointing"""


def test_promised_keys():
    assert set(PROMISED.split()) <= set(leaf_keys(TrainConfig))
    assert {"checkpoint", "eval", "weights"} <= set(leaf_keys(EvalConfig))
