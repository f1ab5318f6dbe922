"""Back into Slurm's queue, when a job has to end before its training is over."""

import logging
import os
import signal
import subprocess

import torch.distributed as dist

from infvit.engine.processes import have_joined, is_first

log = logging.getLogger(__name__)


def requeue(signum: int) -> bool:
    """Asks Slurm to start this job again; the first process asks for all of them.

    Args:
        signum: the signal that stopped the run. Only SIGUSR1 and SIGUSR2 announce a time limit or a preemption; SIGTERM
            is what scancel sends, and means an end.

    Returns:
        Whether Slurm starts the job again; the same on all processes.
    """
    job = os.environ.get("SLURM_JOB_ID")
    if signum not in (signal.SIGUSR1, signal.SIGUSR2) or job is None:
        return False
    if "SLURM_ARRAY_TASK_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    answer = [_ask_slurm(job) if is_first() else False]
    if have_joined():  # torchrun and srun end the first as soon as another has left: not before it has asked
        dist.broadcast_object_list(answer, src=0)
    return answer[0]


def _ask_slurm(job: str) -> bool:
    try:
        subprocess.run(["scontrol", "requeue", job], check=True, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        reason = (getattr(error, "stderr", None) or str(error)).strip()
        log.warning("Slurm did not requeue job %s (%s). Submit it again: it goes on from there.", job, reason)
        return False
    log.info("Slurm starts job %s again.", job)
    return True
