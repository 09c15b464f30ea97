"""The memory that a run takes on its card at most, by a trial of its parts at their full length."""

import torch

from decoding.rollout import Rollout, Sampling, rollout_uniforms
from errors import Interrupted
from learning.memory import free_memory, row_lengths


def predicted_peak(config, learner, decoder, prompts, held_out=()):
    """Bytes that tensors take at their peak where every completion reaches the limit: peak_gib of the log.

    prompts: those of a step, lists of ids; held_out: those of an evaluation, or none. Takes storage as a run
    does, the optimiser's moments too, and computes the largest micro-batch of an update of completions that
    are made up. The weights are changed by their decay alone.
    """
    limit, G = config.max_completion_length, config.num_generations
    torch.cuda.reset_peak_memory_stats()
    if held_out:
        begin(decoder, limit, lambda: decoder.complete(held_out, Sampling(limit)))
    sampling = Sampling(limit, G, config.temperature)
    uniforms = rollout_uniforms(config.seed, 0, 0, len(prompts) * G, limit)
    begin(decoder, limit, lambda: decoder.rollout(prompts, sampling, uniforms))
    rollout = made_up_rollout(decoder, prompts, sampling)
    trained = [p for p in learner.policy.parameters() if p.requires_grad]
    smallest, batches = min(trained, key=torch.Tensor.numel), []

    def remember(rows):
        batches.append(rows)
        return 0.0 * smallest.sum(), {}

    def score(rows):
        logp = learner.scorer(rollout, rows)[0]
        if learner.reference_scorer is not None:
            with torch.no_grad():
                learner.reference_scorer(rollout, rows)
        return logp.sum(), {}

    with torch.enable_grad():
        learner.accumulate_gradients(rollout, remember)  # finds how many tokens fit, as the first step does
        for p in trained:
            p.grad = torch.zeros_like(p)
        learner.step([torch.zeros((), device=rollout.ids.device)])  # takes the moments
        lengths = row_lengths(rollout)
        largest = max(batches, key=lambda rows: sum(lengths[n] for n in rows))
        for _ in batches[:2]:  # the second of a step finds the gradients of the first
            learner.accumulate_gradients(rollout, score, largest)
    peak = torch.cuda.max_memory_allocated()
    learner.optimizer.zero_grad(set_to_none=True)
    free_memory()
    return peak


def begin(decoder, limit, decode):
    """The first steps of a decode, then storage as for its last."""
    asked = iter([False, True])
    decoder.interrupted = lambda: next(asked)
    try:
        decode()
    except Interrupted:
        pass
    finally:
        decoder.interrupted = None
    decoder.engine.backbone.grow(limit)


def made_up_rollout(decoder, prompts, sampling):
    """A Rollout whose completions all reach the limit, of random ids."""
    G, T, N = sampling.num_generations, sampling.max_new_tokens, len(prompts) * sampling.num_generations
    device, lambda_blend = decoder.engine.device, decoder.interaction.lambda_blend
    interacts = lambda_blend > 0 and G > 1
    real = decoder.tables.real.nonzero().flatten()
    blank = torch.zeros(N, T, device=device)
    return Rollout(
        prompts=prompts,
        ids=real[torch.randint(len(real), (N, T), device=device)],
        mask=blank == 0,
        logp=blank,
        ended=torch.zeros(N, dtype=torch.bool, device=device),
        thinking=blank == 0,
        num_generations=G,
        temperature=sampling.temperature or 1.0,
        mix=torch.full((len(prompts), T, G, G), 1 / G, device=device) if interacts else None,
        lambda_blend=lambda_blend if interacts else 0.0,
        input_change=blank if interacts else None,
    )
