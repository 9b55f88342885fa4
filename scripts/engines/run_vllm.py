"""Let vLLM answer prompts, one by one and together; runs in an environment of vLLM's own.

    python run_vllm.py job.json out.json

The job names the model, its prompts as token ids, the batches, requests that come and go, and what
else ``LLM`` is told. What comes out: vLLM's version, per batch the texts, the verify steps and
accepted guesses per position and the seconds, and the texts of the requests. ``scripts/engines.py``
writes the one and reads the other.
"""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FIRST = 8  # tokens of a text before the clock is started
DRAFTS, ACCEPTED = "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens_per_pos"


def counted(llm: Any) -> tuple[int, list[int]]:
    """Return the verify steps and the accepted guesses per position so far."""
    steps, accepted = 0, []
    for metric in llm.get_metrics():
        if metric.name == DRAFTS:
            steps = int(metric.value)
        elif metric.name == ACCEPTED:
            accepted = [int(value) for value in metric.values]
    return steps, accepted


def answered(llm: Any, prompts: Sequence[Sequence[int]], batch: int, limit: int) -> dict[str, Any]:
    """Answer all prompts, so many at a time."""
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=limit)
    texts, steps, seconds, before = [], [], [], counted(llm)
    for first in range(0, len(prompts), batch):
        asked = [{"prompt_token_ids": each} for each in prompts[first : first + batch]]
        begin, known = time.perf_counter(), counted(llm)[0]
        found = llm.generate(asked, greedy, use_tqdm=False)
        seconds.append(time.perf_counter() - begin)
        steps.append(counted(llm)[0] - known)
        texts += [list(each.outputs[0].token_ids) for each in found]
    after = counted(llm)[1]
    earlier = before[1] or [0] * len(after)
    accepted = [now - then for now, then in zip(after, earlier, strict=True)]
    return {"texts": texts, "steps": steps, "accepted": accepted, "seconds": seconds}


def coming_and_going(
    llm: Any, prompts: Sequence[Sequence[int]], requests: Sequence[dict[str, int]]
) -> list[list[int]]:
    """Answer requests that join at a step of the engine; some are aborted behind some tokens."""
    from vllm import SamplingParams

    engine, step, joined = llm.llm_engine, 0, 0
    texts: list[list[int]] = [[] for _ in requests]
    running: set[int] = set()
    while running or joined < len(requests):
        while joined < len(requests) and (not running or requests[joined]["step"] <= step):
            one = requests[joined]
            greedy = SamplingParams(temperature=0, max_tokens=one["limit"])
            ids = {"prompt_token_ids": prompts[one["prompt"]]}
            engine.add_request(str(joined), ids, greedy)
            running.add(joined)
            joined += 1
        found = engine.step()
        for output in found:
            number = int(output.request_id.split("-")[0])
            texts[number] = list(output.outputs[0].token_ids)
            if output.finished:
                running.discard(number)
            elif 0 < requests[number]["abort"] <= len(texts[number]):
                engine.abort_request([output.request_id])
                running.discard(number)
        step += 1
    return texts


def main() -> None:
    """Load, answer, write."""
    import vllm

    job, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    llm = vllm.LLM(
        job["model"],
        max_num_seqs=max(job["batches"]),
        enable_prefix_caching=False,
        disable_log_stats=False,
        **job["options"],
    )
    answered(llm, job["prompts"][:1], 1, FIRST)  # what the first one makes is not clocked
    runs = {
        str(batch): answered(llm, job["prompts"], batch, job["limit"]) for batch in job["batches"]
    }
    asked = job["requests"]
    requests = {"asked": asked, "texts": coming_and_going(llm, job["prompts"], asked)}
    out.write_text(json.dumps({"version": vllm.__version__, "runs": runs, "requests": requests}))


if __name__ == "__main__":
    main()
