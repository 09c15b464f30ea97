"""The scored forward: log-probs and entropies of what was sampled, from the inputs the sampler saw.

B prompts, G generations a prompt, N = B*G rows in group-major order, P prompt tokens, T completion tokens, L tokens of a row that go
through the model, V the tokenizer's real ids, E embedding width."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from decoding.any_model import attend_without_mask, model_body, real_logits, softcap
from decoding.rollout import to_device
from m3po_module import blend


class Scorer(nn.Module):
    """Rebuilds the inputs the sampler saw, runs the body, and returns log-prob and entropy of each completion token.

    The one module that data parallelism wraps: nothing else touches policy weights while gradients are taken.
    """

    def __init__(self, model, tables, bf16=False, chunk_tokens=4096, compiled=False):
        super().__init__()
        self.model, self.tables, self.chunk_tokens = model, tables, chunk_tokens
        self.formulas = token_scores, logits_gradient
        if compiled:
            compile_layers(model)
            self.formulas = [torch.compile(formula, dynamic=True) for formula in self.formulas]
        self.autocast = dict(
            device_type=model.device.type, dtype=torch.bfloat16, enabled=bf16 and model.device.type == "cuda"
        )

    def forward(self, rollout, rows):
        """rollout, list of n row indices -> log-probs and entropies (n, T) float32 at the sampling temperature, 0 where masked.

        Log-probs carry gradient, entropies none.
        """
        with torch.autocast(**self.autocast):
            hidden, row, token = self.hidden(rollout, rows)
            score = self._score_checkpointed if torch.is_grad_enabled() else self._score
            parts = max(
                1, -(-len(token) // self.chunk_tokens)
            )  # about as large as each other: a rest of one token would be compiled for anew
            chunks = zip(
                *(x.tensor_split(parts) for x in (hidden, to_device(rows, hidden.device)[row], token)),
                strict=True,
            )
            pieces = [score(h, rollout.ids[r, t], rollout.temperature) for h, r, t in chunks]
        scores = torch.zeros(2, len(rows), rollout.ids.shape[1], device=hidden.device)
        logp, entropy = (torch.cat(column) for column in zip(*pieces, strict=True))
        return scores[0].index_put((row, token), logp), scores[1].index_put((row, token), entropy)

    def hidden(self, rollout, rows):
        """Hidden states (M, E) from which the M completion tokens of `rows` are predicted, and which token (M,) of which of the rows (M,) each is.

        Each row starts at position 0 (prompt, completion, padding at the right), so that positions are 0, 1, ... and causal attention
        needs no mask at all: what follows a row's end can reach nothing before it. The host knows all sizes, and waits for nothing here.
        """
        device, rows = rollout.ids.device, torch.as_tensor(rows)
        sizes = torch.tensor(
            [[of[n] for n in rows.tolist()] for of in rollout.sizes]
        )  # (2, n) of prompts and completions
        length, total, said = (
            max(int(sizes[1].max()), 1),
            int(sizes.sum(0).max()) - 1,
            int(sizes[1].sum()),
        )  # the last token predicts nothing
        places, prompts, lengths = to_device(torch.stack([rows, *sizes]), device)
        inputs = torch.cat(
            [
                self._embed(rollout.prompt_ids[places // rollout.num_generations]),
                self._completion_inputs(rollout, rows, length),
            ],
            dim=1,
        )
        left = rollout.prompt_ids.shape[1] - prompts[:, None]  # padding
        source = (left + torch.arange(total, device=device)).clamp(max=inputs.shape[1] - 1)  # (n, L)
        inputs = inputs.gather(1, source[..., None].expand(-1, -1, inputs.shape[-1]))
        states = model_body(self.model)(inputs_embeds=inputs, use_cache=False).last_hidden_state  # (n, L, E)
        row = torch.arange(len(rows), device=device).repeat_interleave(lengths, output_size=said)
        token = torch.arange(said, device=device) - (lengths.cumsum(0) - lengths)[row]
        return states[row, prompts[row] - 1 + token], row, token

    def _completion_inputs(self, rollout, rows, length):
        """Inputs (n, T', E) of the completion tokens, blended over their whole groups where paths interacted."""
        G, device = rollout.num_generations, rollout.ids.device
        if rollout.mix is None:
            return self._embed(rollout.ids[to_device(rows, device), :length])
        groups, place = torch.unique(rows // G, return_inverse=True)
        groups, place, path = to_device(groups, device), to_device(place, device), to_device(rows % G, device)
        ids = rollout.ids.view(-1, G, rollout.ids.shape[1])[groups, :, :length].transpose(1, 2)  # (g, T', G)
        inputs = blend(self._embed(ids), rollout.mix[groups, :length], rollout.lambda_blend)  # (g, T', G, E)
        return inputs[place, :, path]

    def _embed(self, ids):
        """The embedding module's output (Gemma scales it), in the dtype that the sampler has it in."""
        embeds = self.model.get_input_embeddings()(ids)
        return embeds.to(torch.bfloat16) if self.autocast["enabled"] else embeds

    def _score(self, hidden, targets, temperature):
        logits = self.model.get_output_embeddings()(hidden)  # (m, W), the only place where they exist
        cap = softcap(self.model)
        numbers = [
            None if x is None else torch.full((), x, device=logits.device) for x in (temperature, cap)
        ]  # a compiler would take floats to the CPU
        return TokenScores.apply(
            logits, targets, *numbers, self.tables.num_real, self.tables.missing, self.formulas
        )

    def _score_checkpointed(self, *inputs):
        return checkpoint(
            self._score, *inputs, use_reentrant=False, preserve_rng_state=False
        )  # nothing there is random


def make_scorer(model, tables, config):
    """The Scorer of a run, for a model that is only scored from now on; compiled on CUDA unless the settings say otherwise (under FSDP2 it is not)."""
    attend_without_mask(model)
    return Scorer(
        model,
        tables,
        config.bf16,
        compiled=config.torch_compile and model.device.type == "cuda" and not config.fsdp,
    )


class TokenScores(torch.autograd.Function):
    """`token_scores` with a backward that keeps nothing of the logits' size but the logits, and makes one thing of it, their gradient."""

    @staticmethod
    def forward(ctx, logits, targets, temperature, cap, num_real, missing, formulas):
        logp, entropy, log_norm = formulas[0](logits.detach(), targets, temperature, cap, num_real, missing)
        ctx.save_for_backward(logits, targets, log_norm)
        ctx.rest = temperature, cap, num_real, missing, formulas[1]
        ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    def backward(ctx, grad, _):
        *rest, gradient = ctx.rest
        return gradient(*ctx.saved_tensors, grad.clone(), *rest), *[
            None
        ] * 6  # a part of a larger tensor would be compiled for anew


def token_scores(logits, targets, temperature, cap, num_real, missing):
    """Log-probs of the targets, entropies and log-normalisers (m,): logits (m, W) of the whole head; temperature and cap are tensors (), cap may be None."""
    logits = real_logits(logits, cap, num_real, missing) / temperature
    log_norm = logits.logsumexp(-1)
    entropy = log_norm - ((logits - log_norm[:, None]).exp() * logits).sum(-1)
    return logits.gather(-1, targets[:, None]).squeeze(-1) - log_norm, entropy, log_norm


def logits_gradient(logits, targets, log_norm, grad, temperature, cap, num_real, missing):
    """What a gradient (m,) of the log-probs is for the logits: (one-hot - softmax) / temperature, through the soft cap; (m, W) in their dtype."""
    probs = (real_logits(logits, cap, num_real, missing) / temperature - log_norm[:, None]).exp()
    hot = torch.arange(probs.shape[-1], device=probs.device) == targets[:, None]
    steps = (hot.float() - probs) * (grad / temperature)[:, None]
    if cap is not None:
        steps = steps * (1 - torch.tanh(logits[..., :num_real].float() / cap) ** 2)
    return F.pad(steps, (0, logits.shape[-1] - probs.shape[-1])).to(logits.dtype)


def compile_layers(model):
    """Compile the decoder layers, in place: all are one piece of code, compiled once for any number of rows and tokens."""
    torch._dynamo.config.optimize_ddp = False  # it would cut each layer where a bucket of gradients ends
    torch._dynamo.config.recompile_limit = (
        16  # one row, few tokens, many: with gradients, without, and again for the reference
    )
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    for module in model.modules():
        if type(module).__name__ in kinds:
            module.compile(dynamic=True)
