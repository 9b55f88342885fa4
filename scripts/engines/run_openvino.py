"""Let OpenVINO GenAI answer prompts, one by one and together; in an environment of its own.

    python run_openvino.py job.json out.json

The job names the model, its prompts as token ids, the batches, a draft and what the generation
config says of it. What comes out: the version, and per batch the texts, the verify steps and
accepted guesses per position, and the seconds. ``scripts/engines.py`` writes the one and reads the
other.
"""

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CONTEXT = 1024  # tokens of a text


def loaded(job: Mapping[str, Any], batch: int) -> Any:
    """Load the models for so many texts at once."""
    import openvino_genai

    told = job["options"]
    asked = openvino_genai.SchedulerConfig()
    asked.cache_size, asked.max_num_seqs, asked.enable_prefix_caching = 1, batch, False
    # with a draft, a prompt that is read in parts (256 tokens by default) gets a wrong text
    asked.max_num_batched_tokens = CONTEXT * batch
    names = ("INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION")
    given: dict[str, Any] = dict.fromkeys(names, told["precision"])
    given["INFERENCE_NUM_THREADS"] = told["threads"]
    if told["draft"]:
        given["draft_model"] = openvino_genai.draft_model(told["draft"], "CPU", **given)
    return openvino_genai.ContinuousBatchingPipeline(job["model"], asked, "CPU", given)


def lengths_of(tokens_per_pass: list[int], text: list[int]) -> list[int]:
    """Return how many tokens each verify step gave of a text.

    The first pass is the prompt's and gives one token. What was accepted behind the end of the text
    is left out, as our own decoding leaves it out.
    """
    rest, found = len(text) - 1, []
    for length in tokens_per_pass[1:]:
        if rest > 0:
            found.append(min(length, rest))
            rest -= found[-1]
    return found


def run(job: Mapping[str, Any], batch: int) -> dict[str, Any]:
    """Answer all prompts, so many at a time."""
    import numpy
    from openvino import Tensor

    pipe, prompts, told = loaded(job, batch), job["prompts"], job["options"]
    config = pipe.get_config()
    config.do_sample, config.max_new_tokens = False, job["limit"]
    for name, value in told["config"].items():
        setattr(config, name, value)

    def answered(some: list[list[int]]) -> list[Any]:
        asked = [Tensor(numpy.array([ids], dtype=numpy.int64)) for ids in some]
        if told["alone"]:
            return [pipe.generate([each], [config])[0] for each in asked]
        return list(pipe.generate(asked, [config] * len(some)))

    answered(prompts[:1])  # what the first one makes is not clocked
    texts, steps, seconds, lengths = [], [], [], []
    for first in range(0, len(prompts), batch):
        begin = time.perf_counter()
        found = answered(prompts[first : first + batch])
        seconds.append(time.perf_counter() - begin)
        texts += [list(each.m_generation_ids[0]) for each in found]
        if not told["draft"]:
            steps.append(0)
            continue
        own = found if told["alone"] else found[:1]  # texts together have passes together
        every = [each.extended_perf_metrics.main_model_metrics.raw_metrics for each in own]
        if batch > 1:
            steps.append(sum(len(passes.m_durations) - 1 for passes in every))
            continue
        (passes,) = every
        lengths += lengths_of(list(passes.m_batch_sizes), texts[-1])
        steps.append(len(lengths) - sum(steps))
    guesses = told["config"].get("num_assistant_tokens", 0)
    accepted = [sum(length > place + 1 for length in lengths) for place in range(guesses)]
    return {"texts": texts, "steps": steps, "accepted": accepted, "seconds": seconds}


def main() -> None:
    """Load, answer, write."""
    import openvino_genai

    job, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    runs: dict[str, Any] = {}
    for batch in job["batches"]:  # those that it answers alone it has answered
        again = runs and job["options"]["alone"]
        runs[str(batch)] = runs["1"] if again else run(job, batch)
    out.write_text(json.dumps({"version": openvino_genai.get_version(), "runs": runs}))


if __name__ == "__main__":
    main()
