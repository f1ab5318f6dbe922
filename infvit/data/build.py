"""From a configuration to a `Source`."""

from collections.abc import Callable, Sequence

from infvit.config import DataConfig
from infvit.data.class_list import choose_classes, read_class_list
from infvit.data.digit_scenes import DigitScenes
from infvit.data.digits import Digits
from infvit.data.folders import folder_source, imagenet_source
from infvit.data.readers import timm_source
from infvit.data.source import Source, Split
from infvit.errors import ConfigError, did_you_mean

DATASETS: dict[str, Callable[[DataConfig, Split, Sequence[str] | None], Source]] = {
    "digits": Digits,
    "digit_scenes": DigitScenes,
    "imagenet": imagenet_source,
    "folder": folder_source,
    "timm": timm_source,
}
"""What `data.name` can be. A new data set is a line here: a function of (config, split, class list)."""


USED_KEYS: dict[str, tuple[str, ...]] = {
    "digits": (),
    "digit_scenes": ("num_samples", "generator_seed"),
    "imagenet": ("root",),
    "folder": ("root",),
    "timm": ("root", "reader", "download"),
}
"""Which of the keys that not every data set uses each one does use."""


def unused_keys(data: DataConfig) -> list[str]:
    """Returns the keys that were set, but that this data set has no use for."""
    default, used = DataConfig(), USED_KEYS.get(data.name)
    if used is None:
        return []  # an unknown name, which `build_source` refuses
    optional = dict.fromkeys(key for keys in USED_KEYS.values() for key in keys)
    return [key for key in optional if key not in used and getattr(data, key) != getattr(default, key)]


def build_source(data: DataConfig, split: Split, classes: Sequence[str] | None = None) -> Source:
    """Opens one split of the configured data set.

    Args:
        data: Which data set.
        split: `train` or `val`.
        classes: Class list that gives the labels: that of the training split or of a checkpoint. None takes the
            training split's own, for `val` too: labels never depend on which classes a held-out split happens to hold.

    Raises:
        ConfigError: A key is missing or wrong.
        DataError: The data is not what the configuration promises.
    """
    if data.name not in DATASETS:
        raise ConfigError(f"data={data.name} is unknown. {did_you_mean(data.name, DATASETS)}")
    build = DATASETS[data.name]
    if data.classes is not None:
        source = build(data, split, None)
        if classes is None:
            known = source.classes if split == "train" else build(data, "train", None).classes
            classes = read_class_list(data.classes, known)
        return choose_classes(source, classes)
    if classes is None and split == "val":
        classes = build(data, "train", None).classes
    return build(data, split, classes)
