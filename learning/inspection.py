"""Looking inside M3PO: which paths of a group listened to which, and whether it mattered (M3PO_DEBUG,
report.html).
"""

import dataclasses
import os
import warnings
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F

from decoding.any_model import vocab_logits
from decoding.rollout import Sampling, rollout_uniforms
from decoding.step import draw
from errors import SettingError, is_out_of_memory
from learning.log_probs import Scorer
from learning.memory import free_memory, row_lengths
from m3po_module import gate_measures

# Tokens at once: several float32 tensors of (LOGITS_AT_ONCE, vocabulary) exist together.
LOGITS_AT_ONCE, STATES_AT_ONCE = 256, 4096
GATES_AT_ONCE = 2**15  # tokens, of which several float32 embeddings exist together


@dataclass
class ListeningEffect:
    """What the peers did to the first group of a rollout.

    `alone` holds the ids that the same draws give after the same tokens without peers. Where scoring rounds a
    draw to another token than the sampler did, nothing can be said: `alone` has the sampled one.
    `completions` are the whole paths that the same draws give without peers from the first token on.
    """

    steps: list  # the first two tokens, and the one with the most uneven weights
    similarity: torch.Tensor  # (steps, G, G) cosines of the paths' next-token distributions at these tokens
    alone: list  # G lists of ids
    divergence: torch.Tensor  # (G,) mean KL of the next-token distribution from the one without peers, nats
    completions: list = field(default_factory=list)  # G Completions, or none where only M3PO_DEBUG asked
    right: list = field(default_factory=list)  # their G verdicts, where somebody has graded them


class Group(NamedTuple):
    """One group of a rollout, on the CPU."""

    mix: torch.Tensor  # (T, G, G)
    thinking: torch.Tensor  # (G, T)
    input_change: torch.Tensor  # (G, T)


def debug_every():
    """M3PO_DEBUG=N: print what happens inside the first group of every N-th step; unset or 0: never."""
    value = os.environ.get("M3PO_DEBUG", "0") or "0"
    if not (value.isascii() and value.isdecimal()):
        remedy = "must be a whole number: 1 looks inside every step, 10 inside every tenth"
        raise SettingError("M3PO_DEBUG", value, remedy)
    return int(value)


def inspect_group(run, sampler, decoder, sampled, step):
    """The ListeningEffect of this step's first group, in the steps where the settings or M3PO_DEBUG ask for
    it.

    None in other steps, on other processes, and where paths do not interact. With M3PO_DEBUG it is printed
    too. It must be called before the update: it reads the group again with the weights that sampled it.
    """
    config, rollout, every = run.config, sampled.rollout, debug_every()
    is_printed = bool(every) and step % every == 0
    is_reported = bool(config.log_groups and config.inspect_every) and step % config.inspect_every == 0
    if not run.accelerator.is_main_process or not (is_printed or is_reported):
        return None
    if rollout.mix is None:
        if is_printed:
            run.say("M3PO_DEBUG: m3po_lambda is 0, the paths do not look at each other")
        return None
    G, T = config.num_generations, config.max_completion_length
    uniforms = rollout_uniforms(config.seed, step, sampled.retries[0], G, T)
    try:
        effect = interaction_effect(Scorer(sampler, decoder.tables), rollout, uniforms)
        if is_reported:
            effect.completions = without_listening(decoder, sampled, effect.alone, uniforms)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        # a run must not end because of its report
        remedy = "--inspect_every 0 leaves it out"
        warnings.warn(f"no memory to read a group again without its peers: {remedy}", stacklevel=2)
        free_memory()
        return None
    if is_printed:
        group = Group(rollout.mix[0].cpu(), rollout.thinking[:G].cpu(), rollout.input_change[:G].cpu())
        ids = [completion.ids for completion in sampled.completions[:G]]
        text = describe_interaction(_pieces(decoder, ids), _pieces(decoder, effect.alone), group, effect)
        instead = "" if rollout.control == "none" else f", of which m3po_control={rollout.control} is heard"
        run.say(f"M3PO_DEBUG, step {step + 1}, first group{instead}: {text}")
        run.say(f"  to see every token: {run.folder / 'report.html'}")
    return effect


def without_listening(decoder, sampled, alone, uniforms):
    """The first group's Completions as the same draws (G, T) give them when nobody listens at all.

    A path none of whose tokens is another one without peers stays what it is: only the others are decoded,
    from the prompt on. After their first other token they go their own way.
    """
    G, T, problem = len(alone), uniforms.shape[1], sampled.problems[0]
    completions = list(sampled.completions[:G])
    turned = [g for g in range(G) if alone[g] != completions[g].ids]
    if turned:
        sampling = Sampling(T, len(turned), sampled.rollout.temperature)
        rollout = decoder.rollout([problem.ids], sampling, uniforms[turned], interact=False)
        for g, completion in zip(turned, decoder.completions(rollout), strict=True):
            completions[g] = problem.answered(completion)
    return completions


@torch.no_grad()
def gate_sums(sampler, rollout):
    """Sums of `gate_measures` over the tokens where a path could choose, as lists of one number; nothing
    where paths do not interact, or where M3PO's own weights are not recorded.

    It must be called before the update: the sampler has the weights that sampled.
    """
    if rollout.mix is None or rollout.control == "scaled_mean":
        return {}
    (B, T, G, _), embed, sums = rollout.mix.shape, sampler.get_input_embeddings(), torch.zeros(4).double()
    sums = sums.to(rollout.ids.device)
    ids, thinking = (x.view(B, G, T).transpose(1, 2) for x in (rollout.ids, rollout.thinking))  # (B, T, G)
    at_once = max(1, GATES_AT_ONCE // (T * G))
    parts = (x.split(at_once) for x in (rollout.mix, thinking, ids))
    for mix, thinks, said in zip(*parts, strict=True):
        could_choose, *measures = gate_measures(mix, thinks, said, embed(said))
        counted = [torch.where(could_choose, measure, 0.0).sum() for measure in measures]
        sums += torch.stack([could_choose.sum(), *counted])
    names = ("choosing", "gate_entropy", "gate_same_token", "gate_mean_cosine")
    return {name: [number] for name, number in zip(names, sums.tolist(), strict=True)}  # device sync


def _pieces(decoder, rows):
    return [[decoder.tokenizer.decode([i]) for i in ids] for ids in rows]


@torch.no_grad()
def interaction_effect(scorer, rollout, uniforms):
    """The ListeningEffect of the first group, scored again with and without peers; uniforms (G, T)."""
    G, plain = rollout.num_generations, dataclasses.replace(rollout, mix=None)
    lengths = rollout.sizes[1][:G]
    rows_at_once = max(1, STATES_AT_ONCE // max(row_lengths(rollout)[:G]))
    steps, alone, distributions, divergence = _steps_to_show(rollout.mix[0]), [], [], torch.zeros(G)
    with torch.autocast(**scorer.autocast):
        for first in range(0, G, rows_at_once):
            rows = list(range(first, min(first + rows_at_once, G)))
            sizes = [lengths[g] for g in rows]
            states = scorer.hidden(rollout, rows)[0].split(sizes)
            plain_states = scorer.hidden(plain, rows)[0].split(sizes)
            for g, state, plain_state in zip(rows, states, plain_states, strict=True):
                ids, divergence[g] = _without_peers(scorer, rollout, g, state, plain_state, uniforms)
                alone.append(ids)
                shown = [
                    vocab_logits(scorer.model, state[t : t + 1], scorer.tables)
                    for t in steps
                    if t < lengths[g]
                ]
                shown = [F.normalize(logits.softmax(-1)[0], dim=-1) for logits in shown]
                shown += [torch.zeros_like(shown[0])] * (len(steps) - len(shown))  # a path that ended earlier
                distributions.append(torch.stack(shown))
    stacked = torch.stack(distributions, dim=1)  # (steps, G, V)
    return ListeningEffect(steps, stacked @ stacked.mT, alone, divergence)


def _steps_to_show(mix):
    """The first two tokens, and the one with the most uneven weights: mix (T, G, G)."""
    uneven = mix.amax((1, 2)) - mix.sum((1, 2)) / mix.shape[-1] ** 2
    return sorted({0, min(1, len(mix) - 1), int(uneven.argmax())})


def _without_peers(scorer, rollout, row, states, plain_states, uniforms):
    """The ids of a row as they would be without peers, and the mean KL; states (length, E)."""
    ids, divergence, length = [], 0.0, len(states)
    for start in range(0, length, LOGITS_AT_ONCE):
        part = slice(start, min(start + LOGITS_AT_ONCE, length))
        with_peers, without = (
            (vocab_logits(scorer.model, s[part], scorer.tables) / rollout.temperature).log_softmax(-1)
            for s in (states, plain_states)
        )
        draws = uniforms[row, part].to(with_peers.device)
        again, other, sampled = draw(with_peers, draws)[0], draw(without, draws)[0], rollout.ids[row, part]
        ids += torch.where(again == sampled, other, sampled).tolist()
        divergence += (with_peers.exp() * (with_peers - without)).sum().cpu() / length
    return ids, divergence


def describe_interaction(tokens, alone, group, effect):
    """Who listened to whom in a group, and did it matter? tokens, alone: G lists of token texts."""
    counts = " ".join(map(str, group.thinking.sum(0).tolist()))
    lines = [f"{len(tokens)} paths; still thinking after each token: {counts}"]
    for t, similarity in zip(effect.steps, effect.similarity, strict=True):
        lines += _describe_step(tokens, t, similarity, group.mix[t])
    lines.append("whom each path listened to most, mean weight over the tokens where it heard somebody:")
    for g, path in enumerate(tokens):
        lines.append(f"  path {g}: {_describe_path(len(path), g, group, effect.divergence[g])}")
    changed = [(g, t) for g, path in enumerate(tokens) for t in range(len(path)) if path[t] != alone[g][t]]
    total = sum(map(len, tokens))
    what = "tokens would have been others with the same draws and without peers"
    lines.append(f"did it matter? {len(changed)} of {total} {what}")
    for g, t in changed[:8]:
        heard = _describe_heard(tokens, g, t, group.mix)
        lines.append(
            f"  path {g}, token {t + 1}: {tokens[g][t]!r} instead of {alone[g][t]!r}, having heard: {heard}"
        )
    return "\n".join(lines)


def _describe_step(tokens, t, similarity, weights):
    yield f"token {t + 1}: similarity of the paths' distributions | weights (row listens to column)"
    for g, path in enumerate(tokens):
        token = (path[t] if t < len(path) else "").replace("\n", "\\n")
        alike = " ".join(f"{v:4.2f}" for v in similarity[g].tolist())
        heard = " ".join(f"{v:4.2f}" if v else "   ." for v in weights[g].tolist())
        yield f"  path {g} {token:>12.12}  {alike} | {heard}"


def _describe_path(length, g, group, divergence):
    """To whom path g listened most, and how much it changed."""
    heard = group.mix[:, g].sum(-1) > 0  # (T,) the input of this token was a blend
    mean, change = torch.zeros(group.mix.shape[-1]), 0.0
    if heard.any():
        mean, change = group.mix[heard, g].mean(0), group.input_change[g][heard].mean()
    order = mean.argsort(descending=True, stable=True).tolist()[:3]
    peers = ", ".join(f"{j} ({mean[j]:.2f})" for j in order if mean[j] > 0)
    return (
        f"heard somebody at {int(heard.sum())} of {length} tokens; {peers or 'nobody'}; "
        f"inputs moved by {change:.1%}, next-token distributions by {divergence:.4f} nats"
    )


def _describe_heard(tokens, g, t, mix):
    """What path g heard just before token t, from the two peers with the largest weights."""
    if t == 0:
        return "nobody just before"
    weights = mix[t - 1, g]
    peers = [j for j in weights.argsort(descending=True).tolist()[:2] if weights[j] > 0]
    return (
        ", ".join(f"path {j} said {tokens[j][t - 1]!r} ({weights[j]:.2f})" for j in peers)
        or "nobody just before"
    )
