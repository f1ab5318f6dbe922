"""The border between Hydra and the program: composed trees become typed configurations, errors become one line.

Hydra composes and sweeps, nothing else. A job never exits the process, since that would end a whole sweep: it leaves
its exit code here, and `launch`, the top of the program, turns the codes into that of the process.
"""

import importlib
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import timm
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from infvit.config import EvalConfig, TrainConfig, leaf_keys
from infvit.engine.device import forget_memory
from infvit.engine.processes import have_joined, leave_processes, lost_another
from infvit.engine.requeue import requeue
from infvit.engine.signals import Interrupted
from infvit.errors import ConfigError, MissingExtraError, UserError, did_you_mean
from infvit.sweep import finish_sweep, forget_sweep, this_job

GROUPS = ("model", "data", "recipe", "engine", "logger", "experiment")
HYDRA_FLAGS = (
    *("help", "hydra-help", "version", "cfg", "resolve", "package", "run", "multirun", "shell-completion", "info"),
    *("config-path", "config-name", "config-dir", "experimental-rerun"),
)
C = TypeVar("C", TrainConfig, EvalConfig)
log = logging.getLogger("infvit")
_exit_codes: list[int] = []


def register_configs(arguments: Sequence[str] | None = None) -> None:
    """Makes the schemas, and every model of timm's registry as `model=timm/NAME`, known to Hydra.

    Args:
        arguments: the command line, by default that of this process.
    """
    store = ConfigStore.instance()
    store.store(name="train_schema", node=_schema(TrainConfig, "model.args"))
    store.store(name="eval_schema", node=_schema(EvalConfig, "data", "roots", "model.args"))
    if not any("timm/" in argument or "experiment" in argument for argument in arguments or sys.argv):
        return  # Hydra copies its store several times: these 1,400 entries would cost every start a second
    for name in timm.list_models():
        store.store(group="model/timm", name=name, node={"name": name}, package="model")


def _schema(schema: type, *free: str) -> DictConfig:
    """Returns the typed tree, in which keys below `free` can be set without a `+`: they have no defaults."""
    node = OmegaConf.structured(schema)
    for key in free:
        OmegaConf.set_struct(OmegaConf.select(node, key), False)
    return node


def launch(main: Callable[[], Any]) -> None:
    """Runs a `hydra.main` function and exits with the status of its jobs; errors are one line on stderr."""
    _show_log()
    # Makes Hydra raise its errors instead of printing and exiting.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    _exit_codes.clear()
    forget_sweep()
    debug = any(re.fullmatch(r"\+*debug=(true|1|yes|on)", argument, re.IGNORECASE) for argument in sys.argv[1:])
    try:
        _refuse_dashes(sys.argv[1:])
        _prepare_launcher(sys.argv[1:])
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenExecutor as error:  # of joblib's launcher, which then ends all of its processes
        _tell(f"error: a job was killed, and those beside it ended; the same command goes on. ({explain(error)[:150]})")
        _exit_codes.append(1)
    except (UserError, HydraException, OmegaConfBaseException) as error:
        if debug:
            traceback.print_exc()
        _tell(f"error: {explain(error)}")
        sys.exit(1)
    except OSError as error:  # of Hydra, which makes the folder of a sweep
        if debug:
            traceback.print_exc()
        _tell(f"error: {error.filename}: {error.strerror}. Start it where you may write, or set hydra.sweep.dir=...")
        sys.exit(1)
    _exit_codes.extend(finish_sweep())
    leave_processes(next((code for code in _exit_codes if code), 0))


def _show_log() -> None:
    """Shows the log on stderr, unless the root logger has handlers."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)


def run_job(cfg: DictConfig, schema: type[C], job: Callable[[C], Any]) -> int:
    """Runs one job of Hydra.

    Args:
        cfg: the composed tree.
        schema: its type.
        job: what to do.

    Returns:
        0, 1 after an error (shown as one line; with `debug=true` its traceback), 130 after Ctrl-C, 143 after another
        signal. It exits the process only where Slurm will start it again, and with it the whole sweep.
    """
    _show_log()  # `launch` has not been called where submitit runs a job
    if any(code >= 128 or (code and have_joined()) for code in _exit_codes):
        return _exit_codes[-1]  # the whole sweep was asked to stop, or the other processes may not be where this one is
    debug = bool(cfg.get("debug"))
    swept = this_job(cfg) if schema is TrainConfig else None
    code, problem = 0, None
    try:
        config = from_hydra(cfg, schema)
        if swept and isinstance(config, TrainConfig):
            if swept.is_done(config):
                _exit_codes.append(0)
                return 0
            swept.begin()
        forget_memory()
        job(config)
    except BaseException as error:
        problem = error
        code = _show(error, debug)
    if swept:
        swept.end(code, problem)
    if isinstance(problem, Interrupted) and OmegaConf.select(cfg, "engine.requeue") and requeue(problem.signum):
        leave_processes(code)  # without a result: that of the job is still to come
    _exit_codes.append(code)
    return code


def _show(error: BaseException, debug: bool) -> int:
    """Shows why a job ended, on stderr, and returns its exit code."""
    if isinstance(error, KeyboardInterrupt):
        _tell("interrupted by Ctrl-C")
        return 130
    if isinstance(error, Interrupted | UserError):
        if debug and not isinstance(error, Interrupted):
            traceback.print_exception(error)
        if not error.shown_elsewhere:
            _tell(f"{'interrupted' if isinstance(error, Interrupted) else 'error'}: {error}")
        return error.exit_code if isinstance(error, Interrupted) else 1
    if not isinstance(error, Exception):
        raise error  # the process is to end
    reason = lost_another(error)
    if reason:
        _tell(f"error: {reason}")
    if debug or not reason:
        traceback.print_exception(error)  # not foreseen: the traceback is what a report needs
    return 1


def _tell(line: str) -> None:
    """Shows why a job ended, once: what goes wrong before the processes have met goes wrong on all of them."""
    rank = int(os.environ.get("RANK", "0"))
    if rank == 0 or have_joined():
        print(f"process {rank}: {line}" if rank else line, file=sys.stderr)


def from_hydra(cfg: DictConfig, schema: type[C]) -> C:
    """Turns a composed tree into a typed configuration.

    Raises:
        ConfigError: a value of the wrong type, an unknown key, or values that do not go together.
    """
    if unknown := _unknown_keys(OmegaConf.to_container(cfg), schema):  # `+key=value` adds what Hydra would refuse
        raise ConfigError(f"unknown key {unknown[0]!r}. {did_you_mean(unknown[0], leaf_keys(schema))}")
    try:
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), cfg))
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error)) from error
    assert isinstance(config, schema)
    return config


def _unknown_keys(tree: Any, schema: type, prefix: str = "") -> list[str]:
    """Returns the dotted keys of a tree that a configuration dataclass does not have."""
    unknown: list[str] = []
    known = {f.name: f.type for f in fields(schema)}
    for name, value in tree.items():
        if name not in known:
            unknown.append(prefix + name)
        elif is_dataclass(known[name]) and isinstance(value, dict):
            unknown += _unknown_keys(value, known[name], f"{prefix}{name}.")  # type: ignore[arg-type]
    return unknown


def _refuse_dashes(arguments: Sequence[str]) -> None:
    """Refuses `--epochs=3`, to which Hydra would answer with its usage."""
    for argument in arguments:
        found = re.match(r"--?([a-z_.-]+)(?:=|$)", argument)
        if found and (found[1] in _known_keys() or (argument.startswith("--") and found[1] not in HYDRA_FLAGS)):
            raise ConfigError(f"{argument}: keys are written without dashes, e.g. epochs=3; Hydra's flags: --help.")


def _prepare_launcher(arguments: Sequence[str]) -> None:
    """Prepares a sweep in other processes, if one is asked for; without -m Hydra would run a single job right here."""
    chosen = next((a for a in arguments if re.fullmatch(r"hydra/launcher=(slurm|submitit_\w+|joblib)", a)), None)
    if chosen is None:
        return
    extra = "joblib" if chosen.endswith("joblib") else "slurm"
    try:
        importlib.import_module(f"hydra_plugins.hydra_{'joblib' if extra == 'joblib' else 'submitit'}_launcher")
    except ImportError as error:
        raise MissingExtraError(chosen, extra) from error
    if extra == "joblib":
        return
    if not {"-m", "--multirun", "hydra.mode=MULTIRUN"} & set(arguments):
        raise ConfigError(f"{chosen} submits jobs only with -m, one job too: python {sys.argv[0]} -m {chosen} ...")
    from infvit.cluster import report_jobs

    report_jobs(_exit_codes)


def explain(error: Exception) -> str:
    """Puts an error of Hydra or OmegaConf into one sentence, with the closest known names where a name is wrong."""
    if isinstance(error, UserError):
        return str(error)
    text = " ".join(str(error).split())
    if isinstance(error, OverrideParseException):
        reason = " ".join(str(error).split("See http")[0].split())
        return (
            f"cannot read {error.override!r} ({reason}). A value with =, a space, a comma or a bracket needs quotes "
            "inside quotes: 'key=\"value\"'."
        )
    if found := re.search(r"Could not find '(hydra/\w+|[\w-]+)/([\w./-]+)'", text):
        group, name = found[1], found[2]
        return f"unknown {group}={name}. {did_you_mean(name, _options(group))}"
    if found := re.search(r"Could not override '([^']+)'|Key '([^']+)' (?:is )?not in", text):
        key = found[1] or getattr(error, "full_key", None) or found[2]
        if key in _known_keys():
            return f"{key} is no group here; set its keys, e.g. {key}.name=... {key}.root=..."
        known = _launcher_keys() if key.startswith("hydra.") else _known_keys()
        return f"unknown key {key!r}. {did_you_mean(key, known)}"
    if text.startswith("Error merging override") and error.__cause__ is not None:
        cause = " ".join(str(error.__cause__).split()).split(" full_key:")[0].rstrip(".")
        return f"{text.removeprefix('Error merging override ')}: {cause}."
    key = getattr(error, "full_key", None)
    message = text.split(" full_key:")[0]
    return f"{key}: {message}" if key and key not in message else message


def _known_keys() -> list[str]:
    if Path(sys.argv[0]).name == "eval.py":
        return [*leaf_keys(EvalConfig), "model"]
    return [*leaf_keys(TrainConfig), *GROUPS]


def _launcher_keys() -> list[str]:
    launcher = OmegaConf.load(Path(sys.argv[0]).parent / "configs" / "hydra" / "launcher" / "slurm.yaml")
    return [f"hydra.launcher.{key}" for key in map(str, launcher)]


def _options(group: str) -> list[str]:
    """Returns the names that a configuration group offers."""
    files = (Path(sys.argv[0]).parent / "configs" / group).glob("*.yaml")
    return [file.stem for file in files] + ([f"timm/{name}" for name in timm.list_models()] if group == "model" else [])
