"""``torchrun`` that passes on what its processes end with.

    python -m specheads.torchrun --nproc-per-node 2 -m specheads.train +recipe=medusa1 ...

takes torchrun's own command line. torchrun ends with 1 whatever its processes did; this ends with
75 where they were interrupted and can be resumed, so that a scheduler starts them again, and with
2 for wrong usage. It hands SIGUSR1 on, which kills torchrun, and gives the processes 120 seconds to
save instead of 30 (``TORCH_ELASTIC_SHUTDOWN_TIMEOUT``).
"""

from __future__ import annotations

import logging
import os
import signal
import sys

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

from specheads.config.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE
from specheads.terminal import stop

# our own processes, and those that the launcher ended because one of them had stopped
_ASKED = {EXIT_INTERRUPTED, -signal.SIGTERM, -signal.SIGINT, -signal.SIGUSR1}


def exit_code(codes: list[int]) -> int:
    """Return what to end with where processes ended with ``codes``, negative for signals."""
    if EXIT_INTERRUPTED in codes and set(codes) <= _ASKED:
        return EXIT_INTERRUPTED
    return EXIT_USAGE if EXIT_USAGE in codes else EXIT_FAILED


def main() -> None:
    """Start the processes and wait for them."""
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
        failures = error.failures
        killed = {
            rank: signal.Signals(-failure.exitcode).name
            for rank, failure in failures.items()
            if failure.exitcode < 0 and failure.exitcode not in _ASKED
        }
        for rank, name in killed.items():
            print(f"specheads: rank {rank} was ended by {name}", file=sys.stderr, flush=True)
        raise SystemExit(exit_code([failure.exitcode for failure in failures.values()])) from None


if __name__ == "__main__":
    main()
