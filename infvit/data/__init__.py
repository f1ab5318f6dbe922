"""Data: sources of images and labels, their check before training, augmentation, and loaders that resume exactly."""

from infvit.data.augment import TrainTransform
from infvit.data.build import DATASETS, build_source, unused_keys
from infvit.data.decode import decode
from infvit.data.loader import Batch, DamageLog, EvalBatch, build_eval_loader, build_train_loader, seeded
from infvit.data.preflight import Preflight, preflight
from infvit.data.sampler import TrainSampler, View
from infvit.data.source import Source, Split
from infvit.data.transforms import Transform, eval_transform, resolve_img_size, train_transform

__all__ = [
    "DATASETS",
    "Batch",
    "DamageLog",
    "EvalBatch",
    "Preflight",
    "Source",
    "Split",
    "TrainSampler",
    "TrainTransform",
    "Transform",
    "View",
    "build_eval_loader",
    "build_source",
    "build_train_loader",
    "decode",
    "eval_transform",
    "preflight",
    "resolve_img_size",
    "seeded",
    "train_transform",
    "unused_keys",
]
