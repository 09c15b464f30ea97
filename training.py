"""What both training scripts share: models, the scored forward, optimiser and schedule, the guarded step, metrics, processes, saving.

Axes: B prompts, G generations a prompt, N = B*G rows in group-major order, P prompt tokens, T completion tokens, L tokens of a row that go
through the model, V the tokenizer's real ids, E embedding width.
"""

import dataclasses
import functools
import math
import re
import statistics
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate.utils import gather_object
from safetensors import SafetensorError
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, get_scheduler
from transformers.pytorch_utils import Conv1D

from backbones import attend_without_mask, check_head, model_body, real_logits, send, softcap, vocab_logits
from config import RunError, SettingError, system_prompt, template_kwargs
from data import arithmetic_tokenizer, encode_prompts, load_problems, split_held_out
from generation import Interrupted, draw
from m3po_module import blend
from memory import REMEDIES, row_lengths
from processes import shard, whole
from rewards import extract_answer, right_answers

# Models


def rollout_dtype(config):
    """bf16 on CUDA, unless bf16 is off; float32 on the CPU."""
    return torch.bfloat16 if config.bf16 and torch.cuda.is_available() else torch.float32


def load_tokenizer(name, trust_remote_code=False):
    """The tokenizer of a model directory or hub id, padding on the left; `tiny` is the embedded one."""
    if name == "tiny":
        return arithmetic_tokenizer()
    tokenizer = _from_pretrained(AutoTokenizer, name, trust_remote_code=trust_remote_code)
    tokenizer.padding_side = "left"
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(name, tokenizer, dtype, device, trust_remote_code=False):
    """A causal model in `dtype` with every dropout probability 0 (I11: a log-prob that enters a ratio must not be random).

    `tiny` is a fresh Llama-shaped model of about 200,000 parameters for the arithmetic problems.
    """
    if name == "tiny":
        ids = dict(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None)
        shape = dict(hidden_size=64, intermediate_size=176, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4, initializer_range=0.1)
        model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=len(tokenizer), tie_word_embeddings=True, **shape, **ids), dtype=dtype)
        model.source_dtype, model.source_dropout = torch.float32, {}
        return model.to(device)
    settings = _from_pretrained(AutoConfig, name, trust_remote_code=trust_remote_code)
    source_dtype = settings.dtype or torch.float32
    text = settings.get_text_config()
    dropout = {key: value for key, value in text.to_dict().items() if re.search("drop", key) and isinstance(value, float)}
    for key in dropout:
        setattr(text, key, 0.0)
    load = dict(config=settings, dtype=dtype, trust_remote_code=trust_remote_code, output_loading_info=True)
    model, found = _from_pretrained(AutoModelForCausalLM, name, **load)
    if found["missing_keys"]:  # transformers would draw them at random, with a table on standard error
        absent = sorted(found["missing_keys"])
        raise SettingError("model", name, f"lacks {len(absent)} of its weights, {absent[0]} among them: it is half a model, or its config.json is another's")
    model = model.to(device)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.source_dtype = source_dtype if isinstance(source_dtype, torch.dtype) else getattr(torch, source_dtype)
    model.source_dropout = dropout
    check_head(model, name)
    return model


def _from_pretrained(kind, name, **kwargs):
    try:
        return kind.from_pretrained(name, **kwargs)
    except (OSError, ValueError, RuntimeError, SafetensorError, TypeError, KeyError) as error:  # the last two: JSON of another shape
        reason = " ".join(str(error).split())[:200]
        raise SettingError("model", name, f"cannot be loaded as a {kind.__name__[4:]}; give a directory or a hub id that can be reached ({reason})") from error


def check_positions(model, problems, config):
    """Refuse prompts and completions that together reach past the positions the model has."""
    positions, longest = getattr(model.config.get_text_config(), "max_position_embeddings", None), max(len(p.ids) for p in problems)
    if positions is not None and longest + config.max_completion_length > positions:
        remedy = f"with the longest prompt of {longest} tokens it passes the model's {positions} positions: lower it, or max_prompt_length"
        raise SettingError("max_completion_length", config.max_completion_length, remedy)


def load_policy(config, name, tokenizer, device):
    """The model that is trained: float32 in full, or with LoRA a frozen base in the sampler's dtype and float32 adapters.

    In train mode: gradient checkpointing needs it; every dropout is 0 (I11).
    """
    load = dict(name=name, tokenizer=tokenizer, device=device, trust_remote_code=config.trust_remote_code)
    policy = load_model(dtype=rollout_dtype(config) if config.lora_r else torch.float32, **load)
    if config.lora_r:
        torch.manual_seed(config.seed)  # the adapters are the same whatever was drawn before
        add_adapters(policy, config)
    return policy.train()


def add_adapters(model, config):
    """Put LoRA adapters into the model, in place, and freeze the rest (https://arxiv.org/abs/2106.09685)."""
    import peft

    wanted = config.lora_target_modules
    settings = peft.LoraConfig(r=config.lora_r, lora_alpha=config.lora_alpha, target_modules=wanted or "all-linear", lora_dropout=0.0)
    if wanted is None:  # every layer of the body that multiplies by a matrix
        kinds = (nn.Linear, Conv1D)
        body = model_body(model)
        settings.target_modules = {name.rsplit(".", 1)[-1] for name, module in body.named_modules() if isinstance(module, kinds)}
    try:
        peft.inject_adapter_in_model(settings, model)
    except ValueError as error:
        raise SettingError("lora_target_modules", wanted, f"does not fit the model ({' '.join(str(error).split())[:200]})") from error
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    if any(hasattr(end, "base_layer") for end in ends) and len({getattr(end, "base_layer", end).weight.data_ptr() for end in ends}) == 1:
        raise SettingError("lora_target_modules", wanted, "this model's embedding and head are one matrix: an adapter on one of them would split it")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def merged_parameters(model):
    """Name and value of each parameter as the model without adapters has it: theirs added to what they belong to."""
    modules = dict(model.named_modules())
    for name, value in model.named_parameters():
        owner = name.removesuffix(".base_layer.weight")
        if owner != name:
            yield f"{owner}.weight", value.float() + modules[owner].get_delta_weight("default").float()
        elif ".lora_" not in name:
            yield name.replace(".base_layer.", "."), value


@torch.no_grad()
def merged_state(model, dtype, keep=True):
    """The state dict as a plain model has it, on the CPU in `dtype`: adapters merged, shards put together, a tied weight one tensor with two names.

    Every process must call it where weights are sharded; those that do not `keep` it get nothing. One tensor at a time goes through the device.
    """
    made = {}
    for parameter, (_, value) in zip(model_weights(model), merged_parameters(model), strict=True):
        value = whole(value)
        made[id(parameter)] = value.to(dtype).cpu() if keep else None
    if not keep:
        return None
    state = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if ".lora_" not in name:
            state[name.replace(".base_layer.", ".")] = made[id(parameter)]
    for name, value in model.state_dict().items():
        plain = name.replace(".base_layer.", ".")
        if ".lora_" not in name and plain not in state:  # buffers
            state[plain] = value.to(dtype).cpu() if value.is_floating_point() else value.cpu()
    return state


def model_weights(model):
    """The parameters that a model without adapters has, in the order of `merged_parameters`."""
    return [parameter for name, parameter in model.named_parameters() if ".lora_" not in name]


@torch.no_grad()
def refresh(copy, policy):
    """Overwrite `copy` (any dtype, fixed storage) with the policy's weights, adapters merged; returns the share of its values that changed (0-d).

    Rounding to bf16 hides small updates from the sampler for a while: this share says how much of an update it sees. It is taken over every 257th
    value of each tensor, a prime, so that all columns are met: comparing all of them takes several times as long as the copying.
    """

    def looked_at():
        return torch.cat([target.flatten()[::257] for target in copy.parameters()])

    before = looked_at()
    for target, (_, source) in zip(copy.parameters(), merged_parameters(policy), strict=True):
        target.copy_(whole(source.detach()))
    return (looked_at() != before).float().mean()


# The scored forward


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
        self.autocast = dict(device_type=model.device.type, dtype=torch.bfloat16, enabled=bf16 and model.device.type == "cuda")

    def forward(self, rollout, rows):
        """rollout, list of n row indices -> log-probs and entropies (n, T) float32 at the sampling temperature, 0 where masked.

        Log-probs carry gradient, entropies none.
        """
        with torch.autocast(**self.autocast):
            hidden, row, token = self.hidden(rollout, rows)
            score = self._score_checkpointed if torch.is_grad_enabled() else self._score
            parts = max(1, -(-len(token) // self.chunk_tokens))  # about as large as each other: a rest of one token would be compiled for anew
            chunks = zip(*(x.tensor_split(parts) for x in (hidden, send(rows, hidden.device)[row], token)), strict=True)
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
        sizes = torch.tensor([[of[n] for n in rows.tolist()] for of in rollout.sizes])  # (2, n) of prompts and completions
        length, total, said = max(int(sizes[1].max()), 1), int(sizes.sum(0).max()) - 1, int(sizes[1].sum())  # the last token predicts nothing
        places, prompts, lengths = send(torch.stack([rows, *sizes]), device)
        inputs = torch.cat([self._embed(rollout.prompt_ids[places // rollout.num_generations]), self._completion_inputs(rollout, rows, length)], dim=1)
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
            return self._embed(rollout.ids[send(rows, device), :length])
        groups, place = torch.unique(rows // G, return_inverse=True)
        groups, place, path = send(groups, device), send(place, device), send(rows % G, device)
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
        numbers = [None if x is None else torch.full((), x, device=logits.device) for x in (temperature, cap)]  # a compiler would take floats to the CPU
        return TokenScores.apply(logits, targets, *numbers, self.tables.num_real, self.tables.missing, self.formulas)

    def _score_checkpointed(self, *inputs):
        return checkpoint(self._score, *inputs, use_reentrant=False, preserve_rng_state=False)  # nothing there is random


def make_scorer(model, tables, config):
    """The Scorer of a run, for a model that is only scored from now on; compiled on CUDA unless the settings say otherwise (under FSDP2 it is not)."""
    attend_without_mask(model)
    return Scorer(model, tables, config.bf16, compiled=config.torch_compile and model.device.type == "cuda" and not config.fsdp)


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
        return gradient(*ctx.saved_tensors, grad.clone(), *rest), *[None] * 6  # a part of a larger tensor would be compiled for anew


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
    torch._dynamo.config.recompile_limit = 16  # one row, few tokens, many: with gradients, without, and again for the reference
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    for module in model.modules():
        if type(module).__name__ in kinds:
            module.compile(dynamic=True)


LOGITS_AT_ONCE, STATES_AT_ONCE = 256, 4096  # tokens; of the first several float32 tensors of so many rows of the vocabulary are there together


@torch.no_grad()
def interaction_effect(scorer, rollout, uniforms):
    """What the blending did to the first group of a rollout, by scoring it again with and without it, some of its paths at a time.

    Returns steps, the first two and the one where the weights are the most uneven; similarity (steps, G, G), the cosines of the paths'
    next-token distributions there; alone, G lists of the ids that the same draws (G, T) give after the same tokens where nobody is heard;
    divergence (G,), the mean KL in nats. Where scoring rounds a draw to another token than the sampler did, nobody knows: `alone` has the sampled one.
    """
    G, plain = rollout.num_generations, dataclasses.replace(rollout, mix=None)
    steps = sorted({0, min(1, len(rollout.mix[0]) - 1), int((rollout.mix[0].amax((1, 2)) - rollout.mix[0].sum((1, 2)) / G**2).argmax())})
    others, similar, divergence = [], [], torch.zeros(G)
    lengths, together = rollout.sizes[1][:G], max(1, STATES_AT_ONCE // max(row_lengths(rollout)[:G]))
    with torch.autocast(**scorer.autocast):
        for g in range(G):
            if g % together == 0:
                rows = list(range(g, min(g + together, G)))
                hidden = [scorer.hidden(r, rows)[0].split(lengths[g : g + together]) for r in (rollout, plain)]
            states, length, other = [h[g % together] for h in hidden], lengths[g], []
            for part in (slice(t, min(t + LOGITS_AT_ONCE, length)) for t in range(0, length, LOGITS_AT_ONCE)):
                heard, alone = ((vocab_logits(scorer.model, h[part], scorer.tables) / rollout.temperature).log_softmax(-1) for h in states)
                again, unheard = (draw(x, uniforms[g, part].to(x.device))[0] for x in (heard, alone))
                other += torch.where(again == rollout.ids[g, part], unheard, rollout.ids[g, part]).tolist()
                divergence[g] += (heard.exp() * (heard - alone)).sum().cpu() / length
            others.append(other)
            there = [vocab_logits(scorer.model, states[0][t : t + 1], scorer.tables).softmax(-1)[0] for t in steps if t < length]
            similar.append(torch.stack([F.normalize(there[i], dim=-1) if i < len(there) else torch.zeros_like(there[0]) for i in range(len(steps))]))
    stacked = torch.stack(similar, dim=1)  # (steps, G, V)
    return {"steps": steps, "similarity": stacked @ stacked.mT, "alone": others, "divergence": divergence}


# Optimiser


def make_optimizer(model, config, total_steps):
    """AdamW over the weights that are trained, decay on matrices only, and its schedule over `total_steps` optimiser steps."""
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices, others = [p for p in trained if p.ndim >= 2], [p for p in trained if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    kind = functools.partial(torch.optim.AdamW, fused=trained[0].device.type == "cuda")
    if config.optimizer == "adamw_8bit":
        import bitsandbytes

        kind = bitsandbytes.optim.AdamW8bit  # moments in blocks of 8-bit codes; of weights under 4,096 numbers in float32
    optimizer = kind([g for g in groups if g["params"]], lr=config.learning_rate, betas=(config.adam_beta1, config.adam_beta2))
    warmup = math.ceil(config.warmup_ratio * total_steps)
    name = "constant_with_warmup" if config.lr_scheduler_type == "constant" else config.lr_scheduler_type
    return optimizer, get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=total_steps)


def guarded_step(accelerator, scorer, optimizer, schedule, losses, max_grad_norm):
    """Clip, then step; a loss or gradient that is not finite, on any process, changes nothing. The schedule goes on in either case.

    Returns (stepped, gradient norm before clipping). Gradients are spent.
    """
    norm = whole(torch.nn.utils.clip_grad_norm_(scorer.parameters(), max_grad_norm or math.inf))
    bad = ~(torch.isfinite(norm) & torch.isfinite(losses).all())
    stepped = float(accelerator.reduce(bad.float(), "sum")) == 0  # device sync
    if stepped:
        try:
            optimizer.step()
        except torch.OutOfMemoryError as error:
            raise RunError(f"out of memory for the optimiser's moments: {REMEDIES}") from error
    optimizer.zero_grad(set_to_none=True)
    schedule.step()
    return stepped, float(norm)


# Problems


def problems_of(config, **how):
    """The problems that the settings of a training or an evaluation name."""
    columns = dict(question_column=config.question_column, answer_column=config.answer_column, solution_column=config.solution_column)
    return load_problems(config.dataset, config.split, limit=config.limit, seed=config.seed, **columns, **how)


def prepare_problems(config, tokenizer, responses=False):
    """Training and held-out problems with their prompts, and how many prompts were too long to use; problems without an answer are not held out."""
    problems = problems_of(config, responses=responses)
    train, held_out = split_held_out(problems, config.eval_problems)  # a warm start leaves out the same ones
    encode = dict(system_prompt=system_prompt(config), max_prompt_length=config.max_prompt_length, chat_template_kwargs=template_kwargs(config))
    train, skipped = encode_prompts(train, tokenizer, **encode)
    held_out, skipped_too = encode_prompts(held_out, tokenizer, **encode) if held_out else ([], 0)
    return train, held_out, skipped + skipped_too


def problem_batch(count, size, first, seed):
    """Indices of `size` problems from place `first` on, in an order that each pass over the data draws anew from (seed, pass)."""
    indices, orders = [], {}
    for place in range(first, first + size):
        passed, offset = divmod(place, count)
        if passed not in orders:
            generator = torch.Generator().manual_seed((seed << 20) + passed)
            orders[passed] = torch.randperm(count, generator=generator).tolist()
        indices.append(orders[passed][offset])
    return indices


def steps_to_do(config, count):
    """Steps of one outer iteration."""
    return config.num_steps if config.num_epochs is None else math.ceil(config.num_epochs * count / config.batch_size)


def unless_stopped(decoder, stop, action):
    """What action() gives; None where a process was told to stop meanwhile. All processes must call it, and no action may wait for another process."""
    decoder.interrupted = stop.asked
    try:
        result = action()
    except Interrupted:
        result = None
    finally:
        decoder.interrupted = None
    return None if stop.agreed() else result


def held_out_accuracy(accelerator, decoder, problems, config, stop, log, step):
    """Share of held-out problems that greedy single-path decoding gets right, and the mean length; every process decodes its part.

    None where the run was told to stop meanwhile. The answers go into the log's evaluations.jsonl as those after `step` steps.
    """
    mine = problems[shard(len(problems), accelerator)]
    answers = unless_stopped(decoder, stop, lambda: decoder.complete([p.ids for p in mine], config.max_completion_length))
    if answers is None:
        return None
    texts = [decoder.text(*pairs[0]) for pairs in answers]
    right = right_answers(texts, [p.problem.answer for p in mine], config.answer_format, config.grading)
    rows = gather_object([
        {"step": step, "example_id": p.problem.id, "question": p.problem.question, "answer": p.problem.answer, "right": bool(is_right),
         "extracted": extract_answer(text, config.answer_format), "length": len(pairs[0][0]), "completion": text}
        for p, is_right, pairs, text in zip(mine, right, answers, texts, strict=True)
    ])  # fmt: skip
    log.write_evaluation(rows)
    return {
        "eval_accuracy": statistics.fmean(r["right"] for r in rows),
        "eval_length": statistics.fmean(r["length"] for r in rows),
        "eval_questions": len(rows),
    }


# Time


class Stopwatch:
    """Seconds since the last lap, the device's work included."""

    def __init__(self, device):
        self.device = device
        self.lap()

    def lap(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        elapsed, self.last = now - getattr(self, "last", now), now
        return elapsed
