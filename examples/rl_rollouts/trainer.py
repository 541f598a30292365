"""One gradient step on the served model itself, shared by all ranks."""

import hashlib
from collections.abc import Sequence

import torch
from agents import Rollout, Turn

from megatron.core import parallel_state


class Trainer:
    """Raises the likelihood of rollouts, of good ones more than of bad ones.

    The objective is the mean loss of the tokens that the model wrote, weighted by 1 + the rollout's
    reward - the mean reward of its group. Ranks share the rollouts and average their gradients, so
    that all of them take the same step.

    Args:
        model: The model; its weights are changed in place.
        step_size: Adam's.
        window: How many tokens before an answer it is learned with, at most; all of them would take
            longer than the rollouts.
    """

    def __init__(self, model: torch.nn.Module, step_size: float, window: int):
        self._model = model
        self._window = window
        self._group = parallel_state.get_data_parallel_group()
        self._rank = torch.distributed.get_rank(self._group)
        self._ranks = torch.distributed.get_world_size(self._group)
        self._optimizer = torch.optim.Adam(model.parameters(), lr=step_size)

    def step(self, rollouts: Sequence[Rollout]) -> float:
        """Take one step, together with all ranks; returns the loss before it.

        Raises:
            RuntimeError: The ranks' weights differ afterwards.
        """
        weighted = list(zip(rollouts, weights(rollouts), strict=True))
        turns = [(turn, weight) for rollout, weight in weighted for turn in rollout.turns]
        self._optimizer.zero_grad(set_to_none=False)
        total = torch.zeros(())
        with torch.enable_grad():
            for turn, weight in turns[self._rank :: self._ranks]:
                loss = weight * self._loss(turn) / len(turns)
                loss.backward()
                total += loss.detach()
        torch.distributed.all_reduce(total, group=self._group)
        self._sum_gradients()
        self._optimizer.step()
        self._check_that_weights_are_equal()
        return float(total)

    def _loss(self, turn: Turn) -> torch.Tensor:
        """Mean loss of the tokens of one answer."""
        ids = torch.tensor([[*turn.prompt[-self._window :], *turn.generated]])
        inputs, labels = ids[:, :-1], ids[:, 1:]
        length = inputs.shape[1]
        later = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
        losses = self._model(inputs, torch.arange(length)[None], later, labels=labels)
        return losses[0, -len(turn.generated) :].mean()

    def _sum_gradients(self) -> None:
        for parameter in self._model.parameters():
            if parameter.grad is None:  # this rank had no turn
                parameter.grad = torch.zeros_like(parameter)
            torch.distributed.all_reduce(parameter.grad, group=self._group)

    def _check_that_weights_are_equal(self) -> None:
        digest = hashlib.sha256()
        for parameter in self._model.parameters():
            digest.update(parameter.detach().numpy().tobytes())
        digests = [""] * self._ranks
        torch.distributed.all_gather_object(digests, digest.hexdigest(), group=self._group)
        if len(set(digests)) != 1:
            raise RuntimeError("the ranks' weights differ after the update")


def weights(rollouts: Sequence[Rollout]) -> list[float]:
    """1 + reward - the group's mean reward, for each rollout."""
    groups: dict[int, list[float]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.group, []).append(rollout.reward)
    means = {group: sum(rewards) / len(rewards) for group, rewards in groups.items()}
    return [1 + rollout.reward - means[rollout.group] for rollout in rollouts]
