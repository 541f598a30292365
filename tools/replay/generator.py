"""Traffic made up from a seed: rollouts, and chats that share a system prompt.

Rollouts have the shape of recorded agents on software issues: turns, prompts and outputs are
lognormal, with the medians and 90th percentiles of design section 10: 36 turns (p50), first
prompts of 1,600 tokens or 23,000 with a heavy harness, answers of 89 tokens (p50; 681 p90), 315
tokens added a turn. All prompts begin with the same 8 blocks.
"""

from dataclasses import dataclass
from math import exp, log

import numpy as np

from replay.workload import Session, Turn, Workload, block_names, members


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of generated rollouts. Lognormal ones are given by median and sigma.

    Attributes:
        groups: Groups, each of one issue.
        group_size: Members of a group; they share the first prompt and then part.
        turns: Turns of a session, median.
        turns_sigma: Sigma of the same.
        first_prompt: Tokens of the first prompt, median.
        system_blocks: Blocks that all first prompts begin with.
        output: Tokens of an answer, median.
        output_sigma: Sigma of the same.
        observed: Tokens that come after an answer, median.
        observed_sigma: Sigma of the same.
        block_size: Tokens in a block.
    """

    groups: int = 128
    group_size: int = 8
    turns: int = 36
    turns_sigma: float = 0.47
    first_prompt: int = 1600
    system_blocks: int = 8
    output: int = 89
    output_sigma: float = 1.588
    observed: int = 100
    observed_sigma: float = 1.46
    block_size: int = 16


FEWEST_TURNS, MOST_TURNS = 10, 150
_MOST_TOKENS = 4096
"""Bounds: recorded sessions stay within them, all but a few."""


def rollouts(shape: Shape, seed: int) -> Workload:
    """Make rollouts; group after group, the members of a group next to each other.

    Args:
        shape: What they look like.
        seed: Equal seeds give equal rollouts.
    """
    rng = np.random.default_rng([seed, 7])
    sessions: list[Session] = []
    for group in range(shape.groups):
        turns = _turns(shape, rng)
        last = turns[-1]
        blocks = (last.prompt_tokens + last.output_tokens) // shape.block_size
        shared = turns[0].prompt_tokens // shape.block_size
        chain = _first_prompt(shape, group, shared) + bytes(8 * (blocks - shared))
        one = Session(f"group{group}", turns, [chain], f"group{group}")
        sessions += members(one, shape.group_size, shared, len(sessions) + shape.groups + 1)
    return Workload("rollouts", shape.block_size, sessions)


def _first_prompt(shape: Shape, group: int, blocks: int) -> bytes:
    common = min(shape.system_blocks, blocks)
    return block_names(np.arange(common), 0) + block_names(np.arange(common, blocks), group + 1)


def _turns(shape: Shape, rng: np.random.Generator) -> list[Turn]:
    drawn = rng.lognormal(log(shape.turns), shape.turns_sigma)
    count = round(min(MOST_TURNS, max(FEWEST_TURNS, drawn)))
    outputs = _tokens(rng, shape.output, shape.output_sigma, count)
    observed = _tokens(rng, shape.observed, shape.observed_sigma, count)
    prompt = round(shape.first_prompt * exp(abs(rng.normal(0.0, 0.2)) - 0.13))
    turns = []
    for output, more in zip(outputs, observed, strict=True):
        turns.append(Turn(prompt, output))
        prompt += output + more
    return turns


def _tokens(rng: np.random.Generator, median: float, sigma: float, count: int) -> list[int]:
    drawn = rng.lognormal(log(median), sigma, count)
    tokens: list[int] = np.clip(drawn, 8, _MOST_TOKENS).astype(int).tolist()
    return tokens


CHATS, CHAT_TURNS, CHAT_SECONDS = 40, 12, 4.0
"""How many chats, of how many turns each, and seconds from one request of them all to the next."""

_SYSTEM_BLOCKS, _QUESTION, _ANSWER, _CHAT_BLOCK = 64, 600, 100, 64


def chats(seed: int) -> Workload:
    """Make chats that share a system prompt of 4,096 tokens and take turns, one request at a time.

    Each turn adds 600 tokens and gets an answer of 100. Every chat has its n-th turn before any has
    the next, in an order of its own.

    Args:
        seed: Of the order.
    """
    rng = np.random.default_rng([seed, 11])
    order = np.concatenate([n * CHATS + rng.permutation(CHATS) for n in range(CHAT_TURNS)])
    at = (CHAT_SECONDS * np.argsort(order)).reshape(CHAT_TURNS, CHATS).T.tolist()
    first = _SYSTEM_BLOCKS * _CHAT_BLOCK + _QUESTION
    prompts = [first + turn * (_QUESTION + _ANSWER) for turn in range(CHAT_TURNS)]
    own = np.arange(prompts[-1] // _CHAT_BLOCK - _SYSTEM_BLOCKS)
    system = block_names(np.arange(_SYSTEM_BLOCKS), 0)
    sessions = [
        Session(
            f"chat{chat}",
            [Turn(tokens, _ANSWER, at=when) for tokens, when in zip(prompts, times, strict=True)],
            [system + block_names(own, chat + 1)],
        )
        for chat, times in enumerate(at)
    ]
    return Workload("chats", _CHAT_BLOCK, sessions, timed=True)
