"""M3PO_DEBUG: which paths of a group listened to which, and whether it mattered."""

import dataclasses
import os
import warnings

import torch
import torch.nn.functional as F

from decoding.any_model import vocab_logits
from decoding.rollout import rollout_uniforms
from decoding.step import draw
from errors import SettingError
from learning.memory import free_memory, row_lengths


def describe_interaction(tokens, alone, mix, thinking, input_change, steps, similarity, divergence):
    """Text for M3PO_DEBUG: who listened to whom in one group, and did it matter?

    tokens, alone: G lists of token texts, as sampled and as the same draws would have given them had nobody been heard; mix (T, G, G);
    thinking, input_change (G, T); similarity (steps, G, G) of the next-token distributions at the tokens `steps`; divergence (G,) mean KL.
    """
    G, mix, thinking = len(tokens), mix.cpu(), thinking.cpu()
    heard = mix.sum(-1).T > 0  # (G, T): the input of this token was a blend
    lines = [f"{G} paths; still thinking after each token: " + " ".join(map(str, thinking.sum(0).tolist()))]
    for place, t in enumerate(steps):
        lines.append(
            f"token {t + 1}: similarity of the paths' distributions | weights (row listens to column)"
        )
        for g in range(G):
            row = (
                " ".join(f"{v:4.2f}" for v in similarity[place, g].tolist()),
                " ".join(f"{v:4.2f}" if v else "   ." for v in mix[t, g].tolist()),
            )
            lines.append(
                f"  path {g} {tokens[g][t] if t < len(tokens[g]) else '':>12.12}  {row[0]} | {row[1]}".replace(
                    "\n", "\\n"
                )
            )
    lines.append("whom each path listened to most, mean weight over the tokens where it heard somebody:")
    for g in range(G):
        mean = mix[heard[g], g].mean(0) if heard[g].any() else torch.zeros(G)
        top = [
            f"{j} ({mean[j]:.2f})"
            for j in mean.argsort(descending=True, stable=True).tolist()[:3]
            if mean[j] > 0
        ]
        change = input_change.cpu()[g][heard[g]].mean() if heard[g].any() else 0.0
        lines.append(f"  path {g}: heard somebody at {int(heard[g].sum())} of {len(tokens[g])} tokens; {', '.join(top) or 'nobody'}; "
                     f"inputs moved by {change:.1%}, next-token distributions by {divergence[g]:.4f} nats")  # fmt: skip
    turned = [(g, t) for g in range(G) for t in range(len(tokens[g])) if tokens[g][t] != alone[g][t]]
    total = sum(map(len, tokens))
    lines.append(
        f"did it matter? {len(turned)} of {total} tokens would have been others with the same draws and nobody heard"
    )
    for g, t in turned[:8]:
        peers = [j for j in mix[t - 1, g].argsort(descending=True).tolist()[:2] if t and mix[t - 1, g, j] > 0]
        said = (
            ", ".join(f"path {j} said {tokens[j][t - 1]!r} ({mix[t - 1, g, j]:.2f})" for j in peers)
            or "nobody just before"
        )
        lines.append(
            f"  path {g}, token {t + 1}: {tokens[g][t]!r} instead of {alone[g][t]!r}, having heard: {said}"
        )
    return "\n".join(lines)


LOGITS_AT_ONCE, STATES_AT_ONCE = (
    256,
    4096,
)  # tokens; of the first several float32 tensors of so many rows of the vocabulary are there together


@torch.no_grad()
def interaction_effect(scorer, rollout, uniforms):
    """What the blending did to the first group of a rollout, by scoring it again with and without it, some of its paths at a time.

    Returns steps, the first two and the one where the weights are the most uneven; similarity (steps, G, G), the cosines of the paths'
    next-token distributions there; alone, G lists of the ids that the same draws (G, T) give after the same tokens where nobody is heard;
    divergence (G,), the mean KL in nats. Where scoring rounds a draw to another token than the sampler did, nobody knows: `alone` has the sampled one.
    """
    G, plain = rollout.num_generations, dataclasses.replace(rollout, mix=None)
    steps = sorted(
        {
            0,
            min(1, len(rollout.mix[0]) - 1),
            int((rollout.mix[0].amax((1, 2)) - rollout.mix[0].sum((1, 2)) / G**2).argmax()),
        }
    )
    others, similar, divergence = [], [], torch.zeros(G)
    lengths, together = rollout.sizes[1][:G], max(1, STATES_AT_ONCE // max(row_lengths(rollout)[:G]))
    with torch.autocast(**scorer.autocast):
        for g in range(G):
            if g % together == 0:
                rows = list(range(g, min(g + together, G)))
                hidden = [
                    scorer.hidden(r, rows)[0].split(lengths[g : g + together]) for r in (rollout, plain)
                ]
            states, length, other = [h[g % together] for h in hidden], lengths[g], []
            for part in (slice(t, min(t + LOGITS_AT_ONCE, length)) for t in range(0, length, LOGITS_AT_ONCE)):
                heard, alone = (
                    (vocab_logits(scorer.model, h[part], scorer.tables) / rollout.temperature).log_softmax(-1)
                    for h in states
                )
                again, unheard = (draw(x, uniforms[g, part].to(x.device))[0] for x in (heard, alone))
                other += torch.where(again == rollout.ids[g, part], unheard, rollout.ids[g, part]).tolist()
                divergence[g] += (heard.exp() * (heard - alone)).sum().cpu() / length
            others.append(other)
            there = [
                vocab_logits(scorer.model, states[0][t : t + 1], scorer.tables).softmax(-1)[0]
                for t in steps
                if t < length
            ]
            similar.append(
                torch.stack(
                    [
                        F.normalize(there[i], dim=-1) if i < len(there) else torch.zeros_like(there[0])
                        for i in range(len(steps))
                    ]
                )
            )
    stacked = torch.stack(similar, dim=1)  # (steps, G, V)
    return {"steps": steps, "similarity": stacked @ stacked.mT, "alone": others, "divergence": divergence}


def debug_every():
    """M3PO_DEBUG=N: look inside the first group of every N-th step; unset or 0: never."""
    value = os.environ.get("M3PO_DEBUG", "0") or "0"
    if not (value.isascii() and value.isdecimal()):
        raise SettingError(
            "M3PO_DEBUG", value, "must be a whole number: 1 looks inside every step, 10 inside every tenth"
        )
    return int(value)


def look_inside(scorer, sampled, step, config):
    """What the paths of the first group did to each other, in the steps where somebody wants to know; None in others, and where nobody listens."""
    wanted = any(
        every and step % every == 0 for every in (config.log_groups and config.inspect_every, debug_every())
    )
    if sampled.rollout.mix is None or not wanted:
        return None
    uniforms = rollout_uniforms(
        config.seed, step, sampled.retries[0], config.num_generations, config.max_completion_length
    )
    try:
        return interaction_effect(scorer, sampled.rollout, uniforms)
    except torch.OutOfMemoryError:  # it is there to be looked at, and no run may end for it
        warnings.warn(
            "no memory to read a group again with nobody heard: --inspect_every 0 leaves it out", stacklevel=2
        )
        free_memory()
        return None


def explain_first_group(decoder, rollout, inside, step, config, folder):
    """The text of M3PO_DEBUG for the first group of this process."""
    if inside is None:
        return (
            "M3PO_DEBUG: m3po_lambda is 0, the paths do not look at each other"
            if rollout.mix is None
            else "M3PO_DEBUG: no memory to look inside"
        )
    G, inside = config.num_generations, dict(inside)
    sampled, alone = (
        [[decoder.tokenizer.decode([i]) for i in ids] for ids in rows]
        for rows in ([i for i, _ in rollout.completions()[:G]], inside.pop("alone"))
    )
    text = describe_interaction(
        sampled, alone, rollout.mix[0], rollout.thinking[:G], rollout.input_change[:G], **inside
    )
    return f"M3PO_DEBUG, step {step + 1}, first group: {text}\n  to see every token: {folder / 'report.html'}"
