"""What `eval.py` knows."""

from dataclasses import dataclass, field
from typing import Any

from infvit.config.keys import DEVICES, PRECISIONS, key, require, require_range
from infvit.config.training import ModelConfig

WEIGHTS = ("raw", "ema")
STANDALONE = ("check", "compare", "efficiency")
"""What `eval.py` does without a model."""


@dataclass
class EfficiencyConfig:
    """How `eval=efficiency` measures. Models and sizes stand beside it: `models`, `resolutions`."""

    modes: list[str] = key(["inference", "training"], "inference, training: what is timed")
    scopes: list[str] = key(["model"], "model: whole models; attention: their attention function alone, on q, k, v")
    batch_sizes: list[int] = key([1], "images per call")
    baselines: list[str] = key([], "models that the others are compared with; default: the first of `models`")
    rounds: int = key(20, "timed calls of each model, in turn")
    warmup: int = key(3, "calls of each model before them that do not count")
    seconds: float = key(60.0, "no new round begins after this time; at least 3 are run")
    energy_seconds: float = key(2.0, "seconds that a model runs for its energy to be read; 0: not measured")
    compile: bool = key(False, "torch.compile what is timed; compilation is in the first call, which stands apart")
    threads: int | None = key(None, "CPU threads; default: torch's own choice")
    memory_limit_gib: float | None = key(None, "what exceeds it is out of memory; default: a CPU's available memory")
    worker_minutes: float = key(10.0, "a measuring process that takes longer is stopped, and its cell says so")
    highest: int | None = key(None, "search the highest resolution without memory failure up to here; null: no search")
    highest_step: int = key(256, "pixels to which that resolution is found")
    inference_watts: float = key(200.0, "constant power of the paper's energy column, inference")
    training_watts: float = key(300.0, "constant power of the paper's energy column, training")

    def __post_init__(self) -> None:
        for name, allowed in (("modes", ("inference", "training")), ("scopes", ("model", "attention"))):
            values = getattr(self, name)
            require(len(values) > 0, f"efficiency.{name}=[] measures nothing; allowed: {', '.join(allowed)}.")
            for value in values:
                require(value in allowed, f"efficiency.{name}: {value!r} must be one of {', '.join(allowed)}.")
        require(len(self.batch_sizes) > 0, "efficiency.batch_sizes=[] measures nothing.")
        require(min(self.batch_sizes) >= 1, f"efficiency.batch_sizes={self.batch_sizes} must be at least 1.")
        for name in ("modes", "scopes", "batch_sizes", "baselines"):
            values = getattr(self, name)
            require(len(set(values)) == len(values), f"efficiency.{name}={values} names one twice.")
        require_range(self, "efficiency.", "rounds threads highest highest_step", 1)
        require_range(self, "efficiency.", "warmup seconds energy_seconds", 0)
        for name in ("worker_minutes", "inference_watts", "training_watts", "memory_limit_gib"):
            value = getattr(self, name)
            require(value is None or value > 0, f"efficiency.{name}={value} must be positive.")


@dataclass
class QualityConfig:
    """How `eval=attention_quality` and `eval=maps` look into a model ([Attention quality](attention-quality.md))."""

    annotations: str | None = key(
        None, "boxes: a folder of VOC-style XML files or a COCO JSON file (digit_scenes: own)"
    )
    image_list: str | None = key(None, "images to take: a file of one a line, or images_*.csv of an earlier result")
    perturbation_images: int = key(1000, "images for MoRF and LeRF, drawn by seed; all if there are no more; 0: none")
    localization_images: int = key(2088, "annotated images for ROC and PR, drawn by seed likewise; 0: none")
    map_images: int = key(4, "images that eval=maps draws")
    seed: int = key(0, "draws the images, and the random order of removal")
    map: str | None = key(None, "weights, in_degree, katz or class_token, as the mechanism has them; null: its default")
    block: int = key(-1, "attention layer whose map is taken, from 0; negative: from the end")
    heads: str = key("mean", "mean or max over the heads, or the number of one head, from 0")
    fill: str = key("mean", "removed patches become the data set's mean colour, black, or a blur of the image")
    blur_sigma: float = key(10.0, "of fill=blur, in pixels of the image that the model sees")

    def __post_init__(self) -> None:
        choices = ("mean", "black", "blur")
        require(self.fill in choices, f"quality.fill={self.fill!r} must be one of {', '.join(choices)}.")
        require(
            self.heads in ("mean", "max") or self.heads.isdecimal(),
            f"quality.heads={self.heads!r} must be mean, max or the number of a head.",
        )
        require_range(self, "quality.", "perturbation_images localization_images", 0)
        require_range(self, "quality.", "map_images", 1)
        require_range(self, "quality.", "seed", 0, 2**32 - 1)
        require(self.blur_sigma > 0, f"quality.blur_sigma={self.blur_sigma} must be positive.")


@dataclass
class EvalConfig:
    """Everything `eval.py` knows. Keys left at null are taken from the checkpoint."""

    model: ModelConfig = field(default_factory=lambda: ModelConfig(name=""))
    efficiency: EfficiencyConfig = field(default_factory=EfficiencyConfig)
    checkpoint: str | None = key(None, "run folder, checkpoint file of a run, timm/NAME, or with model=... any weights")
    eval: Any = key("accuracy", "a name, or a list of names (docs/imagenet.md); or one of check, compare, efficiency")
    weights: str = key("raw", "raw or ema")
    data: dict[str, Any] = key({}, "data keys that replace those of the checkpoint")
    roots: dict[str, Any] = key({}, "folder of one ImageNet set outside data.root, e.g. `roots.imagenet_a=/data/a`")
    quality: QualityConfig = field(default_factory=QualityConfig)
    runs: list[str] = key(
        [], "for eval=compare: two run folders, or two files of predictions; oversmoothing, maps: further models"
    )
    num_images: int | None = key(
        None, "for eval=alignment, health, markov, oversmoothing: images, evenly spread over the split (64, 16, 8, 64)"
    )
    models: list[str] = key(
        [], "for eval=efficiency: NAME, timm/NAME, a run, a sweep; with :unfused (docs/performance.md)"
    )
    resolutions: list[int] = key([], "for eval=efficiency: image sides in pixels")
    on_damaged: str = key("error", "a damaged image is an error, or with exclude left out and counted")
    reparameterize: bool = key(True, "evaluate the form for inference, the same up to rounding; false: as trained")
    device: str = key("auto", "auto, cpu, cuda or mps")
    precision: str = key("auto", "auto, fp32, bf16 or fp16")
    batch_size: int = key(64, "images per forward pass; has no influence on results")
    crop_pct: float | None = key(None, "share of the resized image that the centre crop keeps")
    interpolation: str | None = key(None, "resize filter")
    timeout_minutes: float = key(10.0, "how long a process waits for the others before it ends with an error")
    output: str | None = key(None, "folder for the result files; default: the run folder, or runs/timm-NAME")
    debug: bool = key(False, "show full tracebacks")
    imports: list[str] = key([], "modules to import first")

    def __post_init__(self) -> None:
        self.eval = [self.eval] if isinstance(self.eval, str) else self.eval
        if self.eval == ["oversmoothing"] and self.runs and self.checkpoint is None and not self.model.name:
            self.checkpoint, *self.runs = self.runs
        require(len(self.eval) > 0, "eval=[] names nothing to evaluate.")
        for name in STANDALONE:
            require(name not in self.eval or self.eval == [name], f"eval={name} stands alone; leave the others out.")
        require(
            self.eval[0] in STANDALONE or self.checkpoint is not None or bool(self.model.name),
            "checkpoint=... is missing: name a run folder, e.g. checkpoint=runs/my_run, or model=timm/NAME.",
        )
        compares = self.eval == ["compare"]
        require(not compares or len(self.runs) == 2, "eval=compare needs two runs: 'runs=[runs/first,runs/second]'.")
        require(
            compares or self.eval in (["oversmoothing"], ["maps"]) or not self.runs,
            "runs=... is for eval=compare, maps and oversmoothing; name one run with checkpoint=...",
        )
        require(self.num_images is None or self.num_images >= 1, f"num_images={self.num_images} must be at least 1.")
        measures = self.eval == ["efficiency"]
        for name in ("models", "resolutions"):
            values = getattr(self, name)
            require(measures or not values, f"{name}=... is for eval=efficiency; leave it out.")
            require(bool(values) or not measures, f"eval=efficiency needs {name}=[...].")
            require(len(set(values)) == len(values), f"{name}={values} names one twice.")
        require(min(self.resolutions, default=1) >= 1, f"resolutions={self.resolutions} must be at least 1 pixel.")
        require(
            not measures or self.batch_size == type(self).batch_size,
            f"batch_size={self.batch_size} is not for eval=efficiency: efficiency.batch_sizes=[{self.batch_size}].",
        )
        highest = self.efficiency.highest
        require(
            not measures or highest is None or highest >= min(self.resolutions),
            f"efficiency.highest={highest} is below the smallest of resolutions={self.resolutions}.",
        )
        require(
            not measures or (self.checkpoint is None and not self.model.name),
            "eval=efficiency measures models=[...] (a run too) without weights; leave out checkpoint=... and model=...",
        )
        require(self.weights in WEIGHTS, f"weights={self.weights!r} must be one of {', '.join(WEIGHTS)}.")
        require(self.precision in PRECISIONS, f"precision={self.precision!r} must be one of {', '.join(PRECISIONS)}.")
        require(self.device in DEVICES, f"device={self.device!r} must be one of {', '.join(DEVICES)}.")
        choices = ("error", "exclude")
        require(self.on_damaged in choices, f"on_damaged={self.on_damaged!r} must be one of {', '.join(choices)}.")
        require(self.batch_size >= 1, f"batch_size={self.batch_size} must be at least 1.")
        require(self.timeout_minutes > 0, f"timeout_minutes={self.timeout_minutes} must be positive.")
