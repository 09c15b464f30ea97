"""A small policy with a rollout of it, and what an update of it needs."""

from dataclasses import dataclass
from types import SimpleNamespace

import torch
from accelerate import Accelerator

import grpo_train
from decoding.decoder import GroupDecoder
from decoding.rollout import Interaction, Rollout, Sampling, rollout_uniforms
from grpo_train import Config
from learning.learner import Learner, make_learner
from learning.log_probs import Scorer
from small_models import build_model

FLAGS = dict(
    num_generations=4, max_completion_length=16, learning_rate=0.01, max_grad_norm=1.0, beta=0.0, eval_every=0
)


@dataclass
class SmallUpdate:
    config: Config
    policy: torch.nn.Module
    rollout: Rollout
    learner: Learner

    @property
    def advantages(self):
        return torch.randn(len(self.rollout.ids), generator=torch.Generator().manual_seed(2))

    def update(self, advantages=None):
        advantages = self.advantages if advantages is None else advantages
        return grpo_train.update(self.learner, self.rollout, advantages, self.config)

    def weights(self):
        return [p.detach().clone() for p in self.policy.parameters()]

    def has_weights(self, weights):
        return all(torch.equal(a, b) for a, b in zip(weights, self.policy.parameters(), strict=True))

    def metrics(self, texts, right, rewards, gate=None):
        """rollout_metrics of this rollout on the only process."""
        rewards = torch.tensor(rewards, dtype=torch.float64)
        sampled = SimpleNamespace(rollout=self.rollout, texts=texts, parts={"r": rewards.tolist()})
        return grpo_train.rollout_metrics(SimpleNamespace(config=self.config), sampled, right, rewards, gate)


def small_update(tokenizer, prompts, lambda_blend=0.3, **settings):
    """A small policy with its learner and a rollout of it; the reference, where there is a KL, has other
    weights.
    """
    config = Config(**{**FLAGS, **settings})
    policy, other = build_model("qwen2", tokenizer), build_model("qwen2", tokenizer, seed=1)
    decoder = GroupDecoder(policy, tokenizer, "e", Interaction(lambda_blend))
    decoder.tables.is_eos[3::25] = True
    uniforms = rollout_uniforms(0, 0, 0, len(prompts) * 4, 16)
    rollout = decoder.rollout(prompts, Sampling(16, 4, config.temperature), uniforms)
    learner = make_learner(
        config, Accelerator(cpu=True), policy, other if config.beta else None, decoder, 100
    )
    learner.scorer = Scorer(policy, decoder.tables)
    return SmallUpdate(config, policy, rollout, learner)
