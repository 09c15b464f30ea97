"""The average of the weights over the optimiser steps: where a run keeps one, it is evaluated and saved."""

from contextlib import contextmanager

import torch

from errors import Stopped
from learning.models import refresh
from learning.parallel import whole


class WeightAverage:
    """An exponential moving average of the policy's trained weights, of their shape, dtype and place.

    After step t it moves by max(1 - decay, 1 / t) of the way to the weights: the first 1 / (1 - decay) steps
    count alike (Polyak and Juditsky 1992, https://doi.org/10.1137/0330046), later ones push old ones out.
    """

    def __init__(self, policy, sampler, decay):
        self.policy, self.sampler, self.decay = policy, sampler, decay
        self.steps, self.averages = 0, {}  # {name: tensor}, none before the first step
        self.is_lent = False

    @property
    def trained(self):
        """{name: weight} of what is averaged."""
        return {name: p for name, p in self.policy.named_parameters() if p.requires_grad}

    @torch.no_grad()
    def count_step(self):
        """Take in the weights after an optimiser step."""
        self.steps += 1
        if not self.averages:
            self.averages = {name: p.detach().clone() for name, p in self.trained.items()}
        share = max(1 - self.decay, 1 / self.steps)
        for name, weight in self.trained.items():
            self.averages[name].lerp_(weight.detach(), share)

    @contextmanager
    def in_use(self):
        """While this lasts, the policy and its sampler have the average. Before the first step they are left
        alone. Every process must call it.

        What fails within it ends the run, and nothing is given back: sharded weights would wait for processes
        that did not fail; a study asks the average its other questions then. A signal does not, all have
        agreed on it, and the last weights are saved then.
        """
        if not self.is_lent:
            self._exchange()
        try:
            yield
        except Stopped:
            self._exchange()
            raise
        self._exchange()

    @torch.no_grad()
    def _exchange(self):
        if not self.averages:
            return
        for name, weight in self.trained.items():
            average = self.averages[name]
            kept = weight.detach().clone()
            weight.copy_(average)
            average.copy_(kept)
        refresh(self.sampler, self.policy)
        self.is_lent = not self.is_lent

    def state(self, keep):
        """{average.name: whole tensor on the CPU} for a checkpoint; every process must call it, those that do
        not `keep` it get nothing.
        """
        state = {}
        for name, average in self.averages.items():
            value = whole(average)  # all processes take part
            if keep:
                state[f"average.{name}"] = value.cpu()
        return state
