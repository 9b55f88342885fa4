"""The doors: ``SpecDecoder.generate`` and transformers' ``generate(custom_generate=decoder)``.

Example::

    decoder = SpecDecoder(base, HeadsDrafter(heads, output_layer(base), tree))
    decoder.generate(input_ids, max_new_tokens=64).sequences
    base.generate(input_ids, custom_generate=decoder, do_sample=False, max_new_tokens=64)
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, cast

import torch
from torch import LongTensor, Tensor
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from specheads.decoding.loop import decode
from specheads.decoding.result import DecodeResult
from specheads.decoding.sampling import Sampler
from specheads.drafters.contract import Drafter
from specheads.tree_support import check_tree_support


def eos_ids(eos_token_id: int | Collection[int] | None) -> tuple[int, ...]:
    """Normalise the forms in which configs give the end-of-sequence token."""
    if eos_token_id is None:
        return ()
    return (eos_token_id,) if isinstance(eos_token_id, int) else tuple(eos_token_id)


class SpecDecoder:
    """A base model and a drafter, ready to decode.

    Args:
        base: the base model; its own output is what comes out.
        drafter: proposes; changes the speed and nothing else.
        streamer: fed once per step. Bound here as transformers 5 does not hand the ``streamer`` of
            ``generate`` to a ``custom_generate`` callable.
        seed: of the noise when called through ``base.generate(do_sample=True)``; None draws one
            from torch's generator, so that ``torch.manual_seed`` rules as usual.

    Attributes:
        last_result: the DecodeResult of the latest call, for its accept lengths.

    Raises:
        ValueError: if the base model cannot verify a tree.
    """

    def __init__(
        self,
        base: PreTrainedModel,
        drafter: Drafter,
        streamer: BaseStreamer | None = None,
        seed: int | None = None,
    ) -> None:
        check_tree_support(base)
        self.base = base
        self.drafter = drafter
        self.streamer = streamer
        self.seed = seed
        self.last_result: DecodeResult | None = None

    def generate(
        self,
        input_ids: Tensor,
        max_new_tokens: int = 128,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        eos_token_id: int | Collection[int] | None = None,
    ) -> DecodeResult:
        """Decode one prompt.

        Args:
            input_ids: [1, P].
            max_new_tokens: limit.
            temperature: 0 is greedy.
            top_k: sample among the k most likely tokens; 0 is all.
            top_p: sample among the fewest tokens with this probability together.
            seed: same seed, same tokens, as plain decoding with it.
            eos_token_id: overrides the base's generation config.
        """
        if eos_token_id is None:
            config = self.base.generation_config
            eos_token_id = config.eos_token_id if config is not None else None
        return self._run(
            input_ids,
            max_new_tokens=max_new_tokens,
            sampler=Sampler(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed),
            eos_token_ids=eos_ids(eos_token_id),
        )

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """Serve ``model.generate(..., custom_generate=self)``.

        The names in this signature matter: ``generate`` takes any other than its own away from
        its preparations, so attention_mask and past_key_values stay in ``model_kwargs``. The rest
        of those (position_ids, use_cache, logits_to_keep) describe a prefill; ours is the same.

        Raises:
            ValueError: for another model, beams, padding, a filled cache, or outputs per step.
        """
        if model is not self.base:
            raise ValueError("model is not the base model that this SpecDecoder was made for")
        attention_mask, cache = map(model_kwargs.get, ("attention_mask", "past_key_values"))
        if attention_mask is not None and not bool(attention_mask.all()):
            raise ValueError("attention_mask must be all ones: one unpadded prompt at a time")
        if cache is not None and cache.get_seq_length() > 0:
            raise ValueError(f"past_key_values must be empty, got {cache.get_seq_length()} tokens")
        for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states"):
            if getattr(generation_config, name, None):
                raise ValueError(f"{name} is not available with a tree of guesses")
        if (generation_config.num_beams or 1) > 1:
            raise ValueError(f"num_beams must be 1, got {generation_config.num_beams}")
        # generate() has put temperature, top-k and top-p among the processors
        sampler = Sampler()
        if generation_config.do_sample:
            seed = int(torch.randint(2**62, ())) if self.seed is None else self.seed
            sampler = Sampler(temperature=1.0, seed=seed)
        own_rules = (MaxLengthCriteria, EosTokenCriteria)
        others = [rule for rule in stopping_criteria if not isinstance(rule, own_rules)]
        result = self._run(
            input_ids,
            max_new_tokens=generation_config.max_length - input_ids.shape[1],
            sampler=sampler,
            eos_token_ids=[
                int(token)
                for rule in stopping_criteria
                if isinstance(rule, EosTokenCriteria)
                for token in rule.eos_token_id
            ],
            logits_processor=logits_processor,
            stopping_criteria=StoppingCriteriaList(others) if others else None,
        )
        if generation_config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=cast(LongTensor, result.sequences))
        return result.sequences

    def _run(self, input_ids: Tensor, **options: Any) -> DecodeResult:
        streamer = self.streamer
        if streamer is not None:
            streamer.put(input_ids.cpu())
            options["on_tokens"] = lambda _row, tokens: streamer.put(torch.tensor(tokens))
        self.last_result = decode(self.base, self.drafter, input_ids, **options)
        if streamer is not None:
            streamer.end()
        return self.last_result
