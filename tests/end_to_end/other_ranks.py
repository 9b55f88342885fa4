"""Start or go on with the training of toy_runs.py on any number of ranks, by test_other_ranks.py.

``python other_ranks.py FOLDER NAME STAGE[,STAGE] MAX_STEPS RESUME KIND...``; stage -1: plain torch.
"""

import sys
from pathlib import Path

import torch

from specheads.system import dist
from tests.end_to_end.toy_runs import settings, train

if __name__ == "__main__":
    place, name, stages, max_steps, resume, *kinds = sys.argv[1:]
    torch.set_num_threads(1)
    for stage in map(int, stages.split(",")):
        engine = settings(stage) if stage >= 0 else {}
        for kind in kinds:
            changes = {"max_steps": int(max_steps), "resume": "auto" if resume == "auto" else ""}
            train(Path(place), f"{name}{stage}", kind, engine, **changes)
    dist.shutdown()
