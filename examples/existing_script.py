#!/usr/bin/env python3
"""A script around MegatronAsyncLLM, and the three lines that route its requests by prefix.

torchrun --nproc-per-node 2 examples/existing_script.py [flags of Megatron, and those of routing]
"""

import asyncio
import sys

from megatron.core.inference.apis import MegatronAsyncLLM, SamplingParams

from megatron.core.inference.coordinator import arguments, patch  # line 1
from megatron.core.inference.coordinator.runtime import model as models  # a small GPT, on the CPU

FLAGS = [
    *models.BUILT_IN_MODEL,
    "--inference-dynamic-batching-prefix-caching",
    "--inference-dynamic-batching-prefix-caching-eviction-policy=lru",
    "--inference-dynamic-batching-block-size=64",
]
CHATS, TURNS = 4, 3


async def main() -> None:
    """Hold a few chats at once; what an earlier turn computed is not computed again."""
    # In a script of your own, line 2 is an argument of Megatron's function:
    # parse_and_validate_args(extra_args_provider=arguments.add_prefix_routing_args)
    args = models.parse(arguments.add_prefix_routing_args, [*FLAGS, *sys.argv[1:]])  # line 2
    patch()  # line 3: in every process, before there are engines and clients
    models.initialize(args)
    model, tokenizer = models.build_model(args), models.build_tokenizer(args)
    config = models.build_inference_config(args, model)
    async with MegatronAsyncLLM(model=model, tokenizer=tokenizer, inference_config=config) as llm:
        if not llm.is_primary_rank:
            return  # leaving the block waits until the primary rank has left it
        # Token ids, not text: MegatronAsyncLLM's client has no tokenizer to hash a text with.
        chats = [tokenizer.tokenize(f"Chat {n}: " + "so it goes. " * 20) for n in range(CHATS)]
        for turn in range(TURNS):
            answers = await llm.generate(chats, SamplingParams(num_tokens_to_generate=8, top_k=1))
            cached = [answer.num_cached_tokens for answer in answers]
            print(f"turn {turn}: cached {cached} of {[len(chat) for chat in chats]} tokens")
            for chat, answer in zip(chats, answers, strict=True):
                chat += [*answer.generated_tokens, *tokenizer.tokenize(" And then? " * 8)]


if __name__ == "__main__":
    asyncio.run(main())
