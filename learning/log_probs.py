"""The scored forward: log-probs and entropies of what was sampled, from the inputs that the sampler saw.

B prompts, G generations a prompt, N = B*G rows in group-major order, P prompt tokens, T completion tokens, L
tokens of a row that go through the model, V the tokenizer's real ids, W logits of the whole head, E embedding
width.
"""

from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from decoding.any_model import far_apart, head_output, model_body, real_logits, softcap
from decoding.building import start_compile_workers, why_no_kernels
from decoding.controls import controlled, directions, mean_embedding
from decoding.rollout import to_device
from decoding.self_test import probe_rollout
from errors import one_line
from learning.packing import FLASH, attend_packed, do_not_pack, is_packed, pack
from learning.precision import compute_dtype
from m3po_module import blend

head_kernels = None  # the formulas below do the same

if why_no_kernels() is None:
    from learning import head_kernels


class Head(NamedTuple):
    """How the raw output of a model's head becomes logits.

    Scalars are tensors () on the device.
    """

    temperature: torch.Tensor
    cap: torch.Tensor | None  # soft cap of the logits (Gemma)
    num_real: int  # ids of the tokenizer; the head may have more
    missing: torch.Tensor | None  # (V,) ids below num_real that no token has


class Scorer(nn.Module):
    """Rebuilds the inputs the sampler saw, runs the body, and scores each completion token.

    The one module that data parallelism wraps: nothing else touches policy weights while gradients are taken.
    """

    def __init__(self, model, tables, dtype=torch.float32, chunk_tokens=4096, compiled=False):
        super().__init__()
        self.model, self.tables, self.chunk_tokens = model, tables, chunk_tokens
        self.remark = None  # what there is to say of a slower way that it takes
        kind = model.device.type
        self.formulas = token_scores, logits_gradient
        if kind == "cuda" and head_kernels is not None:
            self.formulas = head_kernels.token_scores, head_kernels.logits_gradient
        if compiled:
            compile_layers(model)
        is_half = dtype != torch.float32 and kind == "cuda"  # the CPU computes in float32
        self.autocast = dict(device_type=kind, dtype=dtype, enabled=is_half)

    def forward(self, rollout, rows):
        """Log-probs and entropies (n, T) float32 of n rows, a list of indices, at the sampling temperature.

        0 where masked. Log-probs carry gradient; a loss that holds the entropies is refused in its backward.
        """
        with torch.autocast(**self.autocast):
            hidden, row, token = self.hidden(rollout, rows)
            targets = rollout.ids[to_device(rows, hidden.device)[row], token]
            score = self._score_checkpointed if self._recomputes_logits() else self._score
            chunks = -(-len(token) // self.chunk_tokens)
            pairs = zip(hidden.tensor_split(chunks), targets.tensor_split(chunks), strict=True)
            scores = [score(states, ids, rollout.temperature) for states, ids in pairs]
        logp, entropy = (torch.cat(column) for column in zip(*scores, strict=True))
        zeros = torch.zeros(2, len(rows), rollout.ids.shape[1], device=hidden.device)
        return zeros[0].index_put((row, token), logp), zeros[1].index_put((row, token), entropy)

    def hidden(self, rollout, rows):
        """Hidden states (M, E) from which the M completion tokens of `rows` are predicted, in any order.

        Returns them, which of the rows each token is in (M,), and which token of it each is (M,). The host
        knows all sizes and waits for nothing here.
        """
        rows = torch.as_tensor(rows)
        return self._packed(rollout, rows) if is_packed(self.model) else self._padded(rollout, rows)

    def _packed(self, rollout, rows):
        """`hidden` where the prompt of each group goes through the model once, and nothing is padded."""
        packing = pack(rollout, rows, self.model.config._attn_implementation == FLASH)
        prompt_inputs = self._embed(rollout.prompt_ids.flatten()[packing.prompt_source])
        if rollout.mix is None:
            ids = rollout.ids[to_device(rows, rollout.ids.device)[packing.row], packing.token]
            completion_inputs = self._embed(ids)
        else:
            longest = max(rollout.sizes[1][n] for n in rows.tolist())
            blended = self._completion_inputs(rollout, rows, longest).flatten(0, 1)
            completion_inputs = blended.index_select(0, packing.row * longest + packing.token)
        inputs = torch.cat([prompt_inputs[None], completion_inputs[None]], dim=1)
        if torch.is_grad_enabled() and not inputs.requires_grad:
            # Of a frozen table. The compiler would make the first layer a code of its own for inputs that
            # need no gradient; so all layers share one.
            inputs.requires_grad_()
        how = dict(position_ids=packing.positions, segments=packing.segments, use_cache=False)
        [states] = model_body(self.model)(inputs_embeds=inputs, **how).last_hidden_state  # (tokens, E)
        # a row's first token is predicted by its prompt's last, each other by the one before it
        first = torch.arange(len(rows), device=inputs.device)
        row, token = torch.cat([first, packing.row]), torch.cat([torch.zeros_like(first), packing.token + 1])
        return torch.cat([states[packing.last], states[len(prompt_inputs) :]]), row, token

    def _padded(self, rollout, rows):
        """`hidden` for any model: each row starts at position 0 (prompt, completion, padding at the right).

        So positions are 0, 1, ... and causal attention needs no mask: what follows a row's end reaches
        nothing before it.
        """
        device = rollout.ids.device
        sizes = torch.tensor(rollout.sizes)[:, rows]  # (2, n) of prompts and completions
        longest_completion, predicted = int(sizes[1].max()), int(sizes[1].sum())
        L = int(sizes.sum(0).max()) - 1  # the last token predicts nothing
        indices, prompts, completions = to_device(torch.stack([rows, *sizes]), device)
        prompt_inputs = self._embed(rollout.prompt_ids[indices // rollout.num_generations])
        completion_inputs = self._completion_inputs(rollout, rows, longest_completion)
        inputs = torch.cat([prompt_inputs, completion_inputs], dim=1)
        padding = rollout.prompt_ids.shape[1] - prompts[:, None]  # on the left of each prompt
        source = (padding + torch.arange(L, device=device)).clamp(max=inputs.shape[1] - 1)  # (n, L)
        inputs = inputs.gather(1, source[..., None].expand(-1, -1, inputs.shape[-1]))
        states = model_body(self.model)(inputs_embeds=inputs, use_cache=False).last_hidden_state  # (n, L, E)
        row = torch.arange(len(rows), device=device).repeat_interleave(completions, output_size=predicted)
        first = completions.cumsum(0) - completions  # of each row, among the M tokens
        token = torch.arange(predicted, device=device) - first[row]
        return states[row, prompts[row] - 1 + token], row, token

    def _completion_inputs(self, rollout, rows, length):
        """Inputs (n, length, E) of the completion tokens, blended over whole groups if paths interacted."""
        G, device = rollout.num_generations, rollout.ids.device
        if rollout.mix is None:
            return self._embed(rollout.ids[to_device(rows, device), :length])
        groups, index = torch.unique(rows // G, return_inverse=True)
        groups, index, path = (to_device(x, device) for x in (groups, index, rows % G))

        def of_paths(values):  # (N, T, ...) -> (g, length, G, ...)
            return values.unflatten(0, (-1, G))[groups, :, :length].transpose(1, 2)

        embeds = self._embed(of_paths(rollout.ids))
        mix, share = rollout.mix[groups, :length], rollout.lambda_blend
        if rollout.scale is None:
            return blend(embeds, mix, share)[index, :, path]
        if rollout.control == "noise":
            keys = rollout.keys.view(-1, 1, G)[groups].expand(-1, length, -1)
            heard = directions(keys, torch.arange(length, device=device)[:, None], embeds.shape[-1])
        else:
            heard = self._embed(of_paths(rollout.heard_ids))
            if rollout.control == "own":
                heard = mean_embedding(heard, of_paths(rollout.heard_probs))
        scale = of_paths(rollout.scale)
        return controlled(rollout.control, embeds, heard, mix, scale, share)[0][index, :, path]

    def _embed(self, ids):
        """The embedding module's output (Gemma scales it), in the dtype that the sampler has it in."""
        embeds = self.model.get_input_embeddings()(ids)
        return embeds.to(self.autocast["dtype"]) if self.autocast["enabled"] else embeds

    def _recomputes_logits(self):
        """Where activations are kept, so are the logits: a card's budget of tokens counts both."""
        keeps = self.model.device.type == "cuda" and not self.model.is_gradient_checkpointing
        return torch.is_grad_enabled() and not keeps

    def _score(self, hidden, targets, temperature):
        raw = head_output(self.model, hidden)  # (m, W), the only place where logits exist
        cap = softcap(self.model)
        temperature = torch.full((), temperature, device=raw.device)
        cap = None if cap is None else torch.full((), cap, device=raw.device)
        head = Head(temperature, cap, self.tables.num_real, self.tables.missing)
        return TokenScores.apply(raw, targets, head, self.formulas)

    def _score_checkpointed(self, *inputs):  # nothing there is random
        return checkpoint(self._score, *inputs, use_reentrant=False, preserve_rng_state=False)


def make_scorer(model, tables, config):
    """The Scorer of a model that from now on only scores rollouts; its rows are packed where they can be.

    Compiled on CUDA unless the settings say otherwise, or what compiling needs is missing.
    """
    dtype = compute_dtype(config.precision, model.device)
    remark = pack_rows(Scorer(model, tables, dtype))
    compiled = config.torch_compile and model.device.type == "cuda" and why_no_kernels() is None
    scorer = Scorer(model, tables, dtype, compiled=compiled)
    scorer.remark = remark
    return scorer


def pack_rows(scorer):
    """Let a scorer's model, in place, attend over packed rows, unless it then gives other states.

    Returns what there is to say of it, or None.
    """
    model, dtype = scorer.model, scorer.autocast["dtype"]
    if is_packed(model):  # since an earlier run of this process
        return None
    whole = _probe_states(scorer)
    remark = attend_packed(model, dtype)
    if is_packed(model):
        try:
            if far_apart(_probe_states(scorer), whole):
                remark = do_not_pack(model, "a packed forward gives other states")
        except Exception as error:  # the code of a hub's model may raise anything
            remark = do_not_pack(model, one_line(error))
    return remark


@torch.no_grad()
def _probe_states(scorer):
    """Hidden states from which the tokens of a few made-up completions are predicted, in a fixed order.

    In the dtype that the forward computes in: float32 weights in the last norm make float32 of what is not.
    """
    with torch.autocast(**scorer.autocast):
        states, row, token = scorer.hidden(probe_rollout(scorer.model), [0, 1, 2, 3])
    return states[(row * (int(token.max()) + 1) + token).argsort()].to(scorer.autocast["dtype"])


class TokenScores(torch.autograd.Function):
    """`token_scores` with a backward that keeps only the logits and makes one tensor of their size.

    The backward has the gradient of the log-probs alone, and refuses a loss that holds the entropy: it would
    be learnt from as if the entropy were not there.
    """

    @staticmethod
    def forward(ctx, raw, targets, head, formulas):
        logp, entropy, log_norm = formulas[0](raw.detach(), targets, head)
        ctx.save_for_backward(raw, targets, log_norm)
        ctx.head, ctx.gradient = head, formulas[1]
        ctx.set_materialize_grads(False)  # else what is not in the loss would have a gradient of zeros
        return logp, entropy

    @staticmethod
    def backward(ctx, grad, entropy_grad):
        if entropy_grad is not None:
            raise NotImplementedError(
                "the entropy is in the loss, but has no gradient here (learning/log_probs.py): take its "
                "score-function form, which docs/change.md shows, or write its backward"
            )
        return ctx.gradient(*ctx.saved_tensors, grad.contiguous(), ctx.head), None, None, None


def _logits(raw, head):
    """(m, W) of any float type -> (m, V) float32 at the sampling temperature."""
    return real_logits(raw, head.cap, head.num_real, head.missing) / head.temperature


def token_scores(raw, targets, head):
    """Log-probs of the targets, entropies and log-normalisers (m,) from the head's raw output (m, W)."""
    logits = _logits(raw, head)
    log_norm = logits.logsumexp(-1)
    scores = logits - log_norm[:, None]
    entropy = -(scores.exp() * scores).sum(-1)
    return scores.gather(-1, targets[:, None]).squeeze(-1), entropy, log_norm


def logits_gradient(raw, targets, log_norm, grad, head):
    """The gradient of the raw logits (m, W), in their dtype, from that of the log-probs (m,).

    (one-hot - softmax) / temperature, through the soft cap.
    """
    probs = (_logits(raw, head) - log_norm[:, None]).exp()
    one_hot = torch.arange(probs.shape[-1], device=probs.device) == targets[:, None]
    gradient = (one_hot.float() - probs) * (grad / head.temperature)[:, None]
    if head.cap is not None:
        gradient = gradient * (1 - torch.tanh(raw[..., : head.num_real].float() / head.cap) ** 2)
    return F.pad(gradient, (0, raw.shape[-1] - probs.shape[-1])).to(raw.dtype)


def compile_layers(model):
    """Compile the decoder layers, in place: they share one code, compiled once for any number of tokens.

    Layers that an earlier run of this process has compiled stay as they are.
    """
    start_compile_workers()
    torch._dynamo.config.optimize_ddp = False  # it would cut each layer where a bucket of gradients ends
    # {one row, few tokens, many} x {with gradients, without} x {policy, reference}
    torch._dynamo.config.recompile_limit = 16
    # A constant, such as an adapter's scaling, is no input: that would be cast in C++, compiled for a minute.
    torch._dynamo.config.specialize_float = True
    layer_classes = set(getattr(model, "_no_split_modules", None) or ())
    for module in model.modules():
        if type(module).__name__ in layer_classes and module._compiled_call_impl is None:
            module.compile(dynamic=True)
