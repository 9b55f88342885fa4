"""Launchers: what they say about the ranks, and a torchrun that passes exit codes on.

``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` are what torch,
DeepSpeed and ``dist.py`` read. torchrun sets them; what srun sets is translated to them.

    python -m specheads.torchrun --nproc-per-node 2 -m specheads.train +recipe=medusa1 ...

takes torchrun's own command line. torchrun ends with 1 whatever its processes did; this ends with
75 where they were interrupted and can be resumed, so that a scheduler starts them again, and with
2 for wrong usage. It hands SIGUSR1 on, which kills torchrun, and gives the processes 120 seconds to
save instead of 30 (``TORCH_ELASTIC_SHUTDOWN_TIMEOUT``).
"""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
from collections.abc import Mapping, MutableMapping

from specheads.system.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, ConfigError
from specheads.system.terminal import stop

COUNTS = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
PLACE = ("MASTER_ADDR", "MASTER_PORT")
FIRST_PORT, NUM_PORTS = 20_000, 10_000


def read_launcher(environment: MutableMapping[str, str] = os.environ) -> None:
    """Put what srun says into the variables that torchrun would set, and check them.

    Only where srun itself started the processes, and several of them: under torchrun, in a batch
    script and on a login node nothing is changed.

    Args:
        environment: the variables, which are changed in place; by default this process's own.

    Raises:
        ConfigError: if the variables contradict each other, or some are missing.
    """
    # SLURM_STEP_NUM_TASKS is set in the steps that srun starts, not in a batch script, whose
    # SLURM_PROCID is 0 and whose SLURM_NTASKS is that of the job
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "")
    by_srun = "WORLD_SIZE" not in environment and "SLURM_PROCID" in environment
    if by_srun and tasks.isdigit() and int(tasks) > 1:
        environment.update(of_srun(environment))
    check_launcher(environment)


def take_local_rank(arguments: list[str]) -> list[str]:
    """Return the command line without ``--local_rank=N``, which goes to ``LOCAL_RANK``.

    The deepspeed launcher passes it on unless it is told ``--no_local_rank``.
    """
    found = {each: re.fullmatch(r"--local[-_]rank=(\d+)", each) for each in arguments}
    for match in filter(None, found.values()):
        os.environ["LOCAL_RANK"] = match[1]
    return [argument for argument in arguments if not found[argument]]


def of_srun(environment: Mapping[str, str]) -> dict[str, str]:
    """Return torchrun's variables for a process that srun started.

    The first host of the step is where the ranks meet, at a port made of job and step, so that two
    jobs on one machine do not; ``MASTER_ADDR`` and ``MASTER_PORT`` may say otherwise.

    Raises:
        ConfigError: if one of Slurm's variables is missing.
    """
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    names = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS")
    missing = [name for name in names if not environment.get(name, "").isdigit()]
    missing += [] if nodes else ["SLURM_JOB_NODELIST"]
    if missing:
        raise ConfigError(f"srun started this process without {missing[0]}; use torchrun instead")
    job = environment.get("SLURM_JOB_ID", "0")
    step = environment.get("SLURM_STEP_ID", "0")
    # jobs are 7 ports apart, so that the first steps of neighbouring jobs do not share one
    number = int(job) * 7 + int(step) if job.isdigit() and step.isdigit() else 0
    # with --gpus-per-task=1 a process sees its own one, which is number 0 to it
    own = re.fullmatch(r"[^,]+", environment.get("CUDA_VISIBLE_DEVICES", ""))
    return {
        "RANK": environment["SLURM_PROCID"],
        "LOCAL_RANK": "0" if own else environment["SLURM_LOCALID"],
        "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
        "MASTER_ADDR": environment.get("MASTER_ADDR") or first_host(nodes),
        "MASTER_PORT": environment.get("MASTER_PORT") or str(FIRST_PORT + number % NUM_PORTS),
    }


def first_host(nodes: str) -> str:
    """Return the first host of Slurm's short form, ``node-a[003-005,9],b7`` say: ``node-a003``."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    assert first is not None
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0])


def check_launcher(environment: Mapping[str, str]) -> None:
    """Check the variables that torchrun and deepspeed set; none of them is one process.

    Raises:
        ConfigError: naming the first that is missing or contradicts another.
    """
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return
    given = {name: environment[name] for name in COUNTS if name in environment}
    for name in COUNTS:
        value = given.get(name, "")
        if not value.isdigit():
            found = f"is {value!r}" if value else "is not set"
            others = " and ".join(f"{key} is {given[key]}" for key in given if key != name)
            raise ConfigError(
                f"{name} {found} while {others}; start the processes with torchrun, deepspeed or"
                " srun, or unset these for one process"
            )
    world = int(given["WORLD_SIZE"])
    for name in ("RANK", "LOCAL_RANK"):
        if int(given[name]) >= world:
            raise ConfigError(
                f"{name} is {int(given[name])}, but WORLD_SIZE is {world}: ranks go from 0 to "
                f"{world - 1}; was the launcher told the right number of machines?"
            )
    missing = [name for name in PLACE if not environment.get(name)]
    if world > 1 and missing:
        raise ConfigError(
            f"{missing[0]} is not set while WORLD_SIZE is {world}: the ranks cannot find each other"
        )


# our own processes, and those that the launcher ended because one of them had stopped
_ASKED = {EXIT_INTERRUPTED, -signal.SIGTERM, -signal.SIGINT, -signal.SIGUSR1}


def exit_code(codes: list[int]) -> int:
    """Return what to end with where processes ended with ``codes``, negative for signals."""
    if EXIT_INTERRUPTED in codes and set(codes) <= _ASKED:
        return EXIT_INTERRUPTED
    return EXIT_USAGE if EXIT_USAGE in codes else EXIT_FAILED


def main() -> None:
    """Start the processes and wait for them."""
    # every command imports this module, and torch takes seconds
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "120")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun sets it too, with a warning
    settings = parse_args(sys.argv[1:])
    if "SIGUSR1" not in settings.signals_to_handle:
        settings.signals_to_handle += ",SIGUSR1"
    # the processes have said in one line each what there is to say
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        run(settings)
    except SignalException as asked:
        name = signal.Signals(asked.sigval).name
        stop(f"stopped by {name}; go on with resume=auto", EXIT_INTERRUPTED)
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        for rank, code in codes.items():
            if code < 0 and code not in _ASKED:
                name = signal.Signals(-code).name
                print(f"specheads: rank {rank} was ended by {name}", file=sys.stderr, flush=True)
        raise SystemExit(exit_code(list(codes.values()))) from None
