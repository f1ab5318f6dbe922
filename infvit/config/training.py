"""What `train.py` knows."""

from dataclasses import dataclass, field
from typing import Any

from infvit.config.keys import DEVICES, PRECISIONS, key, require, require_range

RESIZES = ("torch", "timm")
TORCH_FILTERS = ("bilinear", "bicubic")
"""Resize filters that PyTorch has for 8-bit images, with antialiasing."""
CHANGEABLE = ("epochs", "recipe.lr", "recipe.min_lr")
ELSEWHERE = {
    "img_size": "data.img_size",
    "in_chans": "data.in_chans",
    "num_classes": "data.num_classes",
    "drop_path_rate": "recipe.drop_path",
    "drop_rate": "recipe.drop",
    "pretrained": "init_from=timm/NAME",
    "checkpoint_path": "init_from",
}
"""Arguments of a model's constructor that have a key of their own, and so have no place in `model.args`."""


@dataclass
class ModelConfig:
    """What is trained: a model of timm's registry (ours are in it) and the attention inside it."""

    name: str = key("infvit_linear_mini", "timm model name; `model=timm/NAME` reaches every model of timm's registry")
    attention: str | None = key(None, "attention mechanism that replaces the model's own (ours only), by registry name")
    convert: str | None = key(None, "attention mechanism put into a model of timm's, by registry name; docs/convert.md")
    gamma: float | None = key(None, "path decay of InfSA in (0, 1); the start value when it is trainable (model: 0.7)")
    gamma_trainable: bool | None = key(None, "learn gamma through a sigmoid (model: true)")
    gamma_per_head: bool | None = key(None, "one gamma per head instead of one per layer (model: false)")
    activation: str | None = key(None, "phi of InfSA: relu, gelu or abs (model: relu)")
    args: dict[str, Any] = key({}, "any further argument of the model's constructor, e.g. `model.args.depth=2`")

    def __post_init__(self) -> None:
        require(
            self.attention is None or self.convert is None,
            "model.attention (our own models) and model.convert (models of timm's) are both set; keep one.",
        )
        if self.gamma is not None:
            require(0 < self.gamma < 1, f"model.gamma={self.gamma} must lie strictly between 0 and 1.")
        for name in self.args:
            require(name not in ELSEWHERE, f"model.args.{name} is set by {ELSEWHERE.get(name)}; use that key.")


@dataclass
class DataConfig:
    """What it is trained on, how the images are loaded, and in how large pieces."""

    name: str = key("digits", "digits, digit_scenes, imagenet, folder, or timm (any reader of timm's, see data.reader)")
    root: str | None = key(None, "folder (or tar files) of the data set; relative to where the command is started")
    reader: str | None = key(None, "timm reader for data=timm, e.g. torch/cifar10, hfds/NAME, wds/PATTERN")
    train_split: str = key("train", "name of the training split")
    val_split: str = key("validation", "name of the held-out split")
    classes: str | None = key(None, "only these classes, in this order: imagenet100, or a file of one name a line")
    num_classes: int | None = key(None, "number of classes; needed only where the data set cannot tell")
    img_size: int | None = key(None, "image side in pixels; the model follows. Default: the data set's own size")
    in_chans: int = key(3, "image channels: 3 (RGB) or 1 (grey)")
    mean: list[float] = key([0.485, 0.456, 0.406], "channel means for normalisation")
    std: list[float] = key([0.229, 0.224, 0.225], "channel standard deviations for normalisation")
    num_samples: int | None = key(None, "digit_scenes: images in the training split (held-out: a fifth)")
    generator_seed: int = key(0, "digit_scenes: seed of the generator (the data set itself, not the run)")
    download: bool = key(False, "let timm's reader download the data set")
    max_damaged: int = key(100, "training stops when more images than this cannot be decoded")
    num_workers: int = key(2, "loader processes per training process; has no influence on results")
    micro_batch_size: int | None = key(None, "most images per forward pass; gradients accumulate to batch_size")

    def __post_init__(self) -> None:
        require(self.in_chans in (1, 3), f"data.in_chans={self.in_chans} must be 1 or 3.")
        require_range(self, "data.", "num_classes img_size micro_batch_size num_samples", 1)
        require_range(self, "data.", "num_workers max_damaged", 0)
        for name in ("mean", "std"):
            length = len(getattr(self, name))
            require(length in (1, self.in_chans), f"data.{name} has {length} values, data.in_chans={self.in_chans}.")
        require(min(self.std) > 0, f"data.std={self.std} must be positive.")


@dataclass
class RecipeConfig:
    """How it is trained. `recipe=deit` and `recipe=quick` set every value; nothing is hidden in code."""

    name: str = key("custom", "name of the recipe, for the log")
    # optimiser
    opt: str = key("adamw", "optimiser, by timm's name")
    opt_eps: float = key(1e-8, "epsilon of the optimiser")
    opt_betas: list[float] = key([0.9, 0.999], "betas of the optimiser")
    weight_decay: float = key(0.05, "weight decay; none on parameters of at most one dimension and no_weight_decay()")
    layer_decay: float | None = key(None, "layer-wise learning-rate decay factor")
    clip_grad: float | None = key(None, "largest global gradient norm")
    # learning rate
    lr: float = key(5e-4, "learning rate at a global batch of lr_base_batch")
    lr_base_batch: int | None = key(512, "the rate used is lr * batch_size / lr_base_batch; null: lr as it is")
    sched: str = key("cosine", "schedule, by timm's name")
    sched_on_updates: bool = key(False, "change the rate at every update instead of every epoch")
    min_lr: float = key(1e-5, "rate at the end of the schedule")
    warmup_epochs: float = key(5, "epochs of linear warm-up; a fraction needs sched_on_updates")
    warmup_lr: float = key(1e-6, "rate at the start of the warm-up")
    # regularisation
    smoothing: float = key(0.1, "label smoothing")
    drop_path: float = key(0.1, "stochastic depth rate of the last block")
    drop: float = key(0.0, "dropout rate before the head")
    mixup: float = key(0.8, "mixup alpha; 0: off")
    cutmix: float = key(1.0, "cutmix alpha; 0: off")
    mixup_prob: float = key(1.0, "probability of mixup or cutmix for a batch")
    mixup_switch_prob: float = key(0.5, "probability of cutmix when both are on")
    ema_decay: float | None = key(0.99996, "decay of the weight average; null: none")
    # images
    repeated_aug: int = key(3, "augmented views of an image in one epoch (repeated augmentation); 1: off")
    auto_augment: str | None = key("rand-m9-mstd0.5-inc1", "RandAugment or AutoAugment string of timm; null: off")
    color_jitter: float | None = key(0.3, "colour jitter; timm skips it under auto_augment")
    hflip: float = key(0.5, "probability of a horizontal flip")
    scale: list[float] = key([0.08, 1.0], "area range of the random resized crop")
    ratio: list[float] = key([3 / 4, 4 / 3], "aspect-ratio range of the random resized crop")
    interpolation: str = key("bicubic", "resize filter, training and evaluation")
    resize: str = key("torch", "what resizes training crops: torch (faster) or timm (by Pillow), see docs/data.md")
    reprob: float = key(0.25, "probability of random erasing")
    remode: str = key("pixel", "what random erasing fills in: const, rand or pixel")
    recount: int = key(1, "largest number of erased rectangles")
    crop_pct: float = key(0.875, "evaluation: share of the resized image that the centre crop keeps")

    def __post_init__(self) -> None:
        probabilities = "smoothing drop_path drop mixup_prob mixup_switch_prob hflip reprob ema_decay"
        require_range(self, "recipe.", probabilities, 0, 1)
        require_range(self, "recipe.", "weight_decay opt_eps mixup cutmix min_lr warmup_epochs warmup_lr", 0)
        require_range(self, "recipe.", "repeated_aug recount lr_base_batch", 1)
        require(0 < self.lr < float("inf"), f"recipe.lr={self.lr} must be positive.")
        require(
            all(0 <= beta < 1 for beta in self.opt_betas), f"recipe.opt_betas={self.opt_betas} must each lie in [0, 1)."
        )
        require(0 < self.crop_pct <= 1, f"recipe.crop_pct={self.crop_pct} must lie in (0, 1].")
        require(self.clip_grad is None or self.clip_grad > 0, f"recipe.clip_grad={self.clip_grad} must be positive.")
        require(
            self.layer_decay is None or 0 < self.layer_decay <= 1,
            f"recipe.layer_decay={self.layer_decay} must lie in (0, 1].",
        )
        modes = ("const", "rand", "pixel")
        require(self.remode in modes, f"recipe.remode={self.remode!r} must be one of {', '.join(modes)}.")
        require(self.resize in RESIZES, f"recipe.resize={self.resize!r} must be one of {', '.join(RESIZES)}.")
        require(
            self.sched_on_updates or float(self.warmup_epochs).is_integer(),
            f"recipe.warmup_epochs={self.warmup_epochs} is a fraction, which needs recipe.sched_on_updates=true.",
        )
        for name in ("scale", "ratio"):
            pair = getattr(self, name)
            require(len(pair) == 2 and 0 < pair[0] <= pair[1], f"recipe.{name}={pair} must be [low, high].")

    @property
    def mixes(self) -> bool:
        """Whether images of a batch are mixed in pairs, which needs an even number of them."""
        return (self.mixup > 0 or self.cutmix > 0) and self.mixup_prob > 0

    def inactive(self) -> dict[str, str]:
        """Keys that have no effect beside the others, each with the reason. Shown at start and stored with the run."""
        reasons: dict[str, str] = {}
        if self.auto_augment and self.color_jitter and "3a" not in self.auto_augment:  # 3a: ThreeAugment
            reasons["color_jitter"] = "timm skips colour jitter when auto_augment is set"
        if self.interpolation not in TORCH_FILTERS:
            reasons["resize"] = f"only timm resizes with interpolation={self.interpolation}"
        if self.reprob == 0:
            reasons.update(dict.fromkeys(("remode", "recount"), "reprob is 0"))
        if not self.mixes:
            reasons["mixup_switch_prob"] = "neither mixup nor cutmix is on"
            if self.mixup == self.cutmix == 0:
                reasons["mixup_prob"] = "neither mixup nor cutmix is on"
            else:
                reasons.update(dict.fromkeys(("mixup", "cutmix"), "mixup_prob is 0"))
        elif self.mixup == 0 or self.cutmix == 0:
            reasons["mixup_switch_prob"] = "only one of mixup and cutmix is on"
        if self.warmup_epochs == 0:
            reasons["warmup_lr"] = "warmup_epochs is 0"
        if self.sched == "constant":
            reasons["min_lr"] = "a constant schedule does not fall"
            if self.warmup_epochs == 0:
                reasons["sched_on_updates"] = "a constant schedule without warm-up never changes"
        return reasons


@dataclass
class EngineConfig:
    """How it is run. These keys are not meant to change what is learned."""

    device: str = key("auto", "auto, cpu, cuda or mps; auto takes the best there is")
    precision: str = key("auto", "auto, fp32, bf16 or fp16; auto: bf16 on CUDA, fp32 elsewhere")
    grad_checkpointing: bool = key(False, "recompute activations in the backward pass to save memory")
    channels_last: bool = key(False, "channels-last memory format for images")
    tf32: bool = key(False, "allow TF32 in float32 matrix products on CUDA")
    cudnn_benchmark: bool = key(True, "let cuDNN choose its convolution by measuring (off under deterministic)")
    compile_backend: str = key("inductor", "torch.compile backend for compile=true")
    parallel: str = key("ddp", "several processes: ddp (a copy of the model on each) or fsdp (a share of it on each)")
    timeout_minutes: float = key(10.0, "how long a process waits for the others before it ends with an error")
    log_seconds: float = key(10.0, "seconds between two progress lines when the output is not a terminal")
    eval_every: int = key(1, "epochs between two evaluations; the last epoch is always evaluated")
    checkpoint_minutes: float = key(10.0, "minutes between two checkpoints inside an epoch")
    requeue: bool = key(False, "let Slurm start the job again after SIGUSR1 or SIGUSR2 (time limit, preemption)")
    best_metric: str = key("top1", "what decides best.pt: top1 (raw weights) or ema_top1")
    max_nonfinite: int = key(3, "training stops after this many updates in a row with a non-finite loss or gradient")

    def __post_init__(self) -> None:
        require(self.device in DEVICES, f"engine.device={self.device!r} must be one of {', '.join(DEVICES)}.")
        require(
            self.precision in PRECISIONS, f"engine.precision={self.precision!r} must be one of {', '.join(PRECISIONS)}."
        )
        metrics = ("top1", "ema_top1")
        require(
            self.best_metric in metrics, f"engine.best_metric={self.best_metric!r} must be one of {', '.join(metrics)}."
        )
        kinds = ("ddp", "fsdp")
        require(self.parallel in kinds, f"engine.parallel={self.parallel!r} must be one of {', '.join(kinds)}.")
        require_range(self, "engine.", "eval_every max_nonfinite", 1)
        require_range(self, "engine.", "log_seconds checkpoint_minutes", 0)
        require(self.timeout_minutes > 0, f"engine.timeout_minutes={self.timeout_minutes} must be positive.")


@dataclass
class LoggerConfig:
    """Loggers beside the files of the run folder, which are always written."""

    wandb: bool = key(False, "also log to Weights & Biases; training never depends on it")
    wandb_mode: str = key("online", "online, offline or disabled; falls back to offline without a key or network")
    project: str = key("infvit", "W&B project")
    entity: str | None = key(None, "W&B entity")
    run_name: str | None = key(None, "W&B run name; default: the run folder's name")
    tags: list[str] = key([], "W&B tags")
    tensorboard: bool = key(False, "also write TensorBoard event files, to tensorboard/ in the run folder")

    def __post_init__(self) -> None:
        modes = ("online", "offline", "disabled")
        require(self.wandb_mode in modes, f"logger.wandb_mode={self.wandb_mode!r} must be one of {', '.join(modes)}.")


@dataclass
class TrainConfig:
    """Everything `train.py` knows."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    recipe: RecipeConfig = field(default_factory=RecipeConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    epochs: int = key(300, "passes over the training split")
    max_steps: int | None = key(None, "stop after this many updates (the schedule still spans all epochs)")
    batch_size: int = key(1024, "images per update over all processes and micro-batches")
    seed: int = key(0, "seed of initialisation, data order, augmentation, mixup and dropout")
    deterministic: bool = key(False, "refuse non-deterministic kernels")
    run_dir: str | None = key(None, "run folder; default runs/MODEL-DATA-HASH, in a sweep SWEEP_FOLDER/OVERRIDES")
    fresh: bool = key(False, "move an existing run folder aside and start over")
    dry_run: bool = key(False, "print model, cost, schedule and data check, then stop")
    debug: bool = key(False, "show full tracebacks")
    compile: bool = key(False, "torch.compile the model")
    profile: bool = key(False, "profile updates 3 to 7: writes trace.json and a table of the ten costliest operations")
    imports: list[str] = key([], "modules to import first, e.g. your own models or attention mechanisms")
    allow_change: list[str] = key([], "keys that a run may be continued with anew: epochs, recipe.lr, recipe.min_lr")
    init_from: str | None = key(
        None, "start from the weights of a run folder, a checkpoint file, timm/NAME or hf-hub:ORG/MODEL"
    )
    reset_head: bool = key(False, "with init_from: start with a new classifier head (needed where the classes differ)")

    def __post_init__(self) -> None:
        require_range(self, "", "epochs max_steps batch_size", 1)
        for name in self.allow_change:
            require(
                name in CHANGEABLE,
                f"allow_change={name}: only {', '.join(CHANGEABLE)} may change; anything else is another run.",
            )
        require_range(self, "", "seed", 0, 2**32 - 1)
        warmup, epochs = self.recipe.warmup_epochs, self.epochs
        require(
            warmup < epochs,
            f"recipe.warmup_epochs={warmup} leaves nothing of epochs={epochs}; lower it or train for longer.",
        )
        for name, size in (("batch_size", self.batch_size), ("data.micro_batch_size", self.data.micro_batch_size)):
            require(
                not (self.recipe.mixes and size is not None and size % 2),
                f"{name}={size} is odd, but mixup and cutmix mix images in pairs: make it even, "
                "or switch them off with recipe.mixup=0 recipe.cutmix=0.",
            )
        require(
            not (self.engine.best_metric == "ema_top1" and self.recipe.ema_decay is None),
            "engine.best_metric=ema_top1 needs recipe.ema_decay.",
        )
        if self.engine.parallel == "fsdp":
            for clash, remedy in (
                (self.recipe.ema_decay is not None, "a weight average; use recipe.ema_decay=null"),
                (self.engine.precision == "fp16", "the loss scaling of fp16; use engine.precision=bf16"),
                (self.compile, "compile=true; leave one of them out"),
            ):
                require(not clash, f"engine.parallel=fsdp does not combine with {remedy}.")
        require(
            self.init_from is not None or not self.reset_head, "reset_head=true has no effect without init_from=..."
        )
