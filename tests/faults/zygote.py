"""Starts `train.py` many times for one import of torch: `python zygote.py SCRIPT`, spoken to in lines of JSON.

An object {"argv", "cwd", "env", "log"} forks a process that becomes `python SCRIPT ARGV...`, in a session of its own,
and is answered with its id. A number, the id of such a process, is answered with its exit code once it has ended.

What is forked is a process like any other: it receives signals, starts loader workers and ends through the
interpreter's own exit. Only that torch, timm and infvit are imported already.
"""

import gc
import json
import os
import runpy
import sys
from typing import Any


def become(order: dict[str, Any]) -> None:
    """Gives this process the surroundings of a program that was just started."""
    os.setsid()
    os.chdir(order["cwd"])
    os.environ.update(order["env"])
    sys.argv[1:] = order["argv"]
    nothing, log = os.open(os.devnull, os.O_RDONLY), os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)


def serve(script: str) -> bool:
    """Answers until the input ends; returns whether this is a process that was forked on the way."""
    for line in sys.stdin:
        order = json.loads(line)
        if isinstance(order, int):
            answer = os.waitstatus_to_exitcode(os.waitpid(order, 0)[1])
        else:
            answer = os.fork()
            if answer == 0:
                sys.argv[0] = script
                become(order)
                return True
        print(answer, flush=True)
    return False


if __name__ == "__main__":
    SCRIPT = sys.argv[1]
    runpy.run_path(SCRIPT, run_name="imported")
    gc.freeze()  # collections in the children do not copy what they share
    if serve(SCRIPT):
        runpy.run_path(SCRIPT, run_name="__main__")
