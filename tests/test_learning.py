"""The scored forward, micro-batches, the guarded step and the parts both training scripts share."""

import json
import math
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import grpo_train
from decoding.decoder import GroupDecoder
from decoding.rollout import Interaction, Sampling, rollout_uniforms
from decoding.tokens import token_tables
from errors import SettingError
from learning.learner import Learner, make_optimizer
from learning.log_probs import Head, Scorer, TokenScores, logits_gradient, make_scorer, token_scores
from learning.memory import micro_batches
from learning.models import (
    add_adapters,
    check_positions,
    load_model,
    load_models,
    load_policy,
    load_tokenizer,
    merged_state,
    policy_bytes,
    refresh,
)
from running.folder import save_adapter, save_model
from small_models import FAMILIES, build_model
from small_update import small_update

G, T = 3, 24


def rollout_of(model, tokenizer, prompts, lam=0.3, temperature=1.0, length=T, similarity="distribution"):
    decoder = GroupDecoder(model, tokenizer, "e", Interaction(lam, 0.1, similarity))
    decoder.tables.is_eos[3::25] = True  # more ends than two ids would give in so few tokens
    uniforms = rollout_uniforms(0, 0, 0, len(prompts) * G, length)
    return decoder, decoder.rollout(prompts, Sampling(length, G, temperature), uniforms)


def all_rows(rollout):
    return torch.arange(len(rollout.ids))


@pytest.mark.parametrize("lam", [0.0, 0.3])
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_scoring_equals_sampling(model, tokenizer, prompts, lam, temperature):
    """I1: the published scripts sample from blended inputs and score plain ids, so they train a policy that
    never acted.
    """
    decoder, out = rollout_of(model, tokenizer, prompts, lam, temperature)
    logp, _ = Scorer(model, decoder.tables)(out, all_rows(out))
    assert out.ended.any(), "ended rows are part of the claim"
    assert not out.ended.all()
    assert torch.allclose(logp, out.logp, atol=1e-5)
    if lam:
        out.mix = None
        plain, _ = Scorer(model, decoder.tables)(out, all_rows(out))
        assert (plain - out.logp).abs().max() > 0.05, "plain ids are another policy"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_runs_scorer_asks_for_no_mask_where_none_is_needed(
    family, tokenizer, prompts, monkeypatch, tmp_path
):
    """transformers would compare positions to find out, and the host wait for the card at the start of every
    forward (12 to 17 ms each, on an H200).
    """
    model, scored = (build_model(family, tokenizer) for _ in range(2))
    decoder, out = rollout_of(model, tokenizer, prompts)
    scorer = make_scorer(scored, decoder.tables, grpo_train.Config())
    asked = []
    monkeypatch.setattr(
        "transformers.masking_utils.find_packed_sequence_indices", lambda positions: asked.append(positions)
    )
    assert torch.allclose(scorer(out, all_rows(out))[0], out.logp, atol=1e-5)
    assert bool(asked) == (family in ("gemma3", "gpt2")), "a sliding window is a mask"
    save_model(scored, tokenizer, tmp_path, torch.float32)
    assert "packed" not in (tmp_path / "config.json").read_text()


def test_scoring_equals_sampling_for_every_similarity(llama, tokenizer, prompts):
    for similarity in ("embedding", "mean"):
        decoder, out = rollout_of(llama, tokenizer, prompts, similarity=similarity)
        assert torch.allclose(Scorer(llama, decoder.tables)(out, all_rows(out))[0], out.logp, atol=1e-5)


def test_entropy_is_that_of_the_sampling_distribution(llama, tokenizer, prompts):
    decoder, out = rollout_of(llama, tokenizer, prompts[:1], lam=0.0, temperature=0.7)
    _, entropy = Scorer(llama, decoder.tables)(out, all_rows(out))
    row = torch.tensor([prompts[0] + out.ids[0][out.mask[0]].tolist()])
    logp = (llama(input_ids=row).logits[0, len(prompts[0]) - 1 : -1, : len(tokenizer)] / 0.7).log_softmax(-1)
    assert torch.allclose(entropy[0][out.mask[0]], -(logp.exp() * logp).sum(-1), atol=1e-4)


def gradients(model, tables, out, batches, chunk=2048):
    """Gradients of a loss with a different weight for every token."""
    model.zero_grad(set_to_none=True)
    weights = torch.rand(out.logp.shape, generator=torch.Generator().manual_seed(3)) * out.mask
    for rows in batches:
        (Scorer(model, tables, chunk_tokens=chunk)(out, rows)[0] * weights[rows]).sum().backward()
    return [p.grad.clone() for p in model.parameters()]


def test_gradients_do_not_depend_on_how_the_batch_is_cut(tokenizer, prompts):
    """I3, with micro-batches that cut groups while their paths interact."""
    model = build_model("qwen2", tokenizer)
    decoder, out = rollout_of(model, tokenizer, prompts)
    whole = gradients(model, decoder.tables, out, [all_rows(out)])
    scale = max(float(g.abs().max()) for g in whole)
    for batches, chunk in [
        (all_rows(out).split(1), 2048),
        (all_rows(out).split(4), 7),
        (micro_batches(out, 120), 2048),
    ]:
        assert len(batches) > 1
        cut = gradients(model, decoder.tables, out, batches, chunk)
        assert max(float((a - b).abs().max()) for a, b in zip(whole, cut, strict=True)) < 1e-6 * max(
            1.0, scale
        )


def test_gradients_reach_the_embeddings_of_the_paths_that_were_heard(tokenizer, prompts):
    """One row's log-probs move the embeddings of tokens that only its peers sampled."""
    model = build_model("llama", tokenizer)
    decoder, out = rollout_of(model, tokenizer, prompts[2:3], lam=0.5)
    Scorer(model, decoder.tables)(out, torch.tensor([0]))[0].sum().backward()
    heard = {
        int(out.ids[j, t]) for t in range(out.mix.shape[1] - 1) for j in (1, 2) if out.mix[0, t, 0, j] > 0.01
    }
    others = heard - set(out.ids[0].tolist()) - set(prompts[2])
    assert others
    assert all(model.get_input_embeddings().weight.grad[token].abs().sum() > 0 for token in others)


def test_nothing_after_eos_and_no_padding_can_change_a_score(model, tokenizer, prompts):
    """I5: TRL PR#2708 attended and scored tokens after EOS; GPT-2 has absolute positions (TRL#6800)."""
    decoder, out = rollout_of(model, tokenizer, prompts)
    score = Scorer(model, decoder.tables)
    before, _ = score(out, all_rows(out))
    out.ids = torch.where(out.mask, out.ids, torch.randint(3, 200, out.ids.shape))
    width = out.prompt_ids.shape[1]
    rows = [
        [7] * 50 + [5] * (width - len(prompt)) + prompt for prompt in prompts
    ]  # other padding, and more of it
    assert torch.equal(torch.tensor(rows)[:, -1], out.prompt_ids[:, -1])
    out.prompt_ids = torch.tensor(rows)
    out.mix = torch.cat([out.mix, torch.zeros(len(prompts), 9, G, G)], 1)
    out.ids, out.mask = (
        torch.cat([out.ids, torch.full((len(out.ids), 9), 3)], 1),
        torch.cat([out.mask, torch.zeros(len(out.ids), 9, dtype=torch.bool)], 1),
    )
    after, _ = score(out, all_rows(out))
    assert torch.allclose(before, after[:, : before.shape[1]], atol=1e-5)
    assert not after[:, before.shape[1] :].any()


def test_the_eos_that_ends_a_completion_is_trained(tokenizer, prompts):
    """TRL PR#4970: with pad = eos, a mask by id leaves EOS without gradient and stopping is never learned."""
    tokenizer = build_pad_is_eos(tokenizer)
    model = build_model("llama", tokenizer)
    decoder, out = rollout_of(model, tokenizer, prompts, lam=0.0, length=60)
    n = int(out.ended.nonzero()[0, 0])
    logp, _ = Scorer(model, decoder.tables)(out, torch.tensor([n]))
    assert logp[0, out.lengths[n] - 1] != 0
    assert decoder.tables.is_eos[out.ids[n, out.lengths[n] - 1]]


def build_pad_is_eos(tokenizer):
    import copy

    same = copy.deepcopy(tokenizer)
    same.pad_token = same.eos_token
    return same


def test_micro_batches_hold_every_row_once_within_the_budget(llama, tokenizer, prompts):
    decoder, out = rollout_of(llama, tokenizer, prompts)
    lengths = torch.tensor(out.sizes[0]) + out.lengths
    for budget in (1, 60, 200, 10**6):
        batches = micro_batches(out, budget)
        assert sorted(n for rows in batches for n in rows) == list(range(len(out.ids)))
        assert all(len(rows) == 1 or len(rows) * int(lengths[rows].max()) <= budget for rows in batches)
    assert len(micro_batches(out, 10**6)) == 1


def test_micro_batches_are_about_as_large_as_each_other(monkeypatch):
    """64 rows of 384 tokens at 8,192 are four batches of 16, not three of 21 and one row alone."""
    rollout = SimpleNamespace(sizes=([128] * 64, [256] * 64), num_generations=8)
    assert [len(rows) for rows in micro_batches(rollout, 8192)] == [16] * 4
    rollout = SimpleNamespace(sizes=([10] * 5, [90, 10, 20, 30, 40]), num_generations=1)
    assert micro_batches(rollout, 100) == [[0], [4, 3], [2, 1]]


def config_for_steps(**kwargs):
    from grpo_train import Config

    return Config(learning_rate=0.1, max_grad_norm=1.0, **kwargs)


def small_learner(model, max_grad_norm=1.0, **settings):
    """A Learner of a module that is its own scorer, for its optimiser steps alone."""
    optimizer, schedule = make_optimizer(model, config_for_steps(**settings), 10)
    parts = dict(scorer=model, optimizer=optimizer, schedule=schedule, max_grad_norm=max_grad_norm)
    others = dict(reference=None, tokenizer=None, reference_scorer=None, budget=None)
    return Learner(accelerator=Accelerator(cpu=True), policy=model, **parts, **others)


def test_a_loss_or_gradient_that_is_not_finite_changes_nothing():
    """verl#721: one NaN step, and every completion after it was '!!!!'."""
    model, fine = torch.nn.Linear(3, 1), torch.tensor(1.0)
    learner = small_learner(model)
    moments = learner.optimizer.state
    model(torch.ones(2, 3)).sum().backward()
    assert learner.step([fine])[0]
    before = [p.clone() for p in model.parameters()]
    state = [v.clone() for s in moments.values() for v in s.values()]
    for losses, poison in (([fine, fine * math.nan], 1.0), ([fine], math.inf), ([fine], math.nan)):
        (model(torch.ones(2, 3)).sum() * poison).backward()
        has_stepped, _ = learner.step(losses)
        now = [v for s in moments.values() for v in s.values()]
        assert not has_stepped
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert all(torch.equal(a, b) for a, b in zip(state, now, strict=True))
        assert all(p.grad is None for p in model.parameters())
    assert learner.schedule.last_epoch == 4, "the schedule goes on"


@pytest.mark.filterwarnings("error")
def test_a_first_step_that_is_skipped_warns_of_nothing():
    """torch told the user to call `optimizer.step()` first."""
    model = torch.nn.Linear(3, 1)
    learner = small_learner(model)
    (model(torch.ones(2, 3)).sum() * math.nan).backward()
    assert not learner.step([torch.tensor(1.0)])[0]


def test_a_warning_of_each_step_is_shown_once(monkeypatch):
    """Python forgets what it has shown where filters change, and a reward function's came at every step."""
    model, shown = torch.nn.Linear(3, 1), []
    learner = small_learner(model)
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        monkeypatch.setattr(warnings, "showwarning", lambda message, *where: shown.append(str(message)))
        for _ in range(3):
            warnings.warn("of a reward", stacklevel=1)
            model(torch.ones(2, 3)).sum().backward()
            learner.step([torch.tensor(1.0)])
    assert shown.count("of a reward") == 1


def test_a_step_that_one_process_cannot_take_is_taken_by_none():
    """Weights that differ between processes from then on are never told."""
    model, another = torch.nn.Linear(3, 1), 1.0  # another process says that its gradient is not finite
    learner = small_learner(model)
    learner.accelerator = SimpleNamespace(reduce=lambda value, how: value + another)
    before = [p.clone() for p in model.parameters()]
    model(torch.ones(2, 3)).sum().backward()
    assert learner.step([torch.tensor(1.0)])[0] is False
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_the_learning_rate_warms_up_and_follows_its_curve():
    """It began at 0: a run of one step saved its start unchanged, and the first rollout taught nothing."""

    def rates(kind, steps=10):
        model = torch.nn.Linear(3, 1)
        optimizer, schedule = make_optimizer(
            model, config_for_steps(lr_scheduler_type=kind, warmup_ratio=0.2), steps
        )
        out = []
        for _ in range(steps):
            out.append(round(schedule.get_last_lr()[0], 4))
            optimizer.step()
            schedule.step()
        return out

    assert rates("constant") == [0.05] + [0.1] * 9
    assert rates("constant", steps=12)[:4] == [0.0333, 0.0667, 0.1, 0.1], "2.4 steps of warm-up are three"
    assert rates("linear") == [0.05, 0.1, 0.1, 0.0875, 0.075, 0.0625, 0.05, 0.0375, 0.025, 0.0125]
    assert rates("cosine")[6] == pytest.approx(0.05)
    for kind in ("constant", "linear", "cosine"):
        assert rates(kind, steps=1) == [0.1]
        assert min(rates(kind)) > 0


def test_refresh_copies_every_weight_into_the_same_storage_and_tells_the_share_that_changed(tokenizer):
    policy, copy = build_model("llama", tokenizer), build_model("llama", tokenizer).to(torch.bfloat16)
    refresh(copy, policy)
    places = [p.data_ptr() for p in copy.parameters()]
    assert float(refresh(copy, policy)) == 0
    with torch.no_grad():
        for p in policy.parameters():
            p.mul_(1 + 1e-4)  # far below bf16's steps of 2^-8
    hidden = float(refresh(copy, policy))
    with torch.no_grad():
        for p in policy.parameters():
            p.mul_(1.5)
    assert hidden < 0.2 < 0.95 < float(refresh(copy, policy))
    assert places == [p.data_ptr() for p in copy.parameters()]
    assert all(
        torch.equal(a, b.to(torch.bfloat16))
        for a, b in zip(copy.parameters(), policy.parameters(), strict=True)
    )


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_dropout_is_zero_after_loading_whatever_the_config_says(tokenizer, tmp_path, family):
    """I11: two forwards of the model in train() must give the same log-probs. GPT-2 drops in modules, Llama
    in its attention function.
    """
    model = build_model(family, tokenizer)
    names = ("resid_pdrop", "embd_pdrop", "attn_pdrop") if family == "gpt2" else ("attention_dropout",)
    for name in names:
        setattr(model.config, name, 0.5)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model = load_model(str(tmp_path), tokenizer, torch.float32, "cpu").train()
    ids = torch.arange(20).view(1, 20)
    assert torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)
    raw = AutoModelForCausalLM.from_pretrained(tmp_path).train()
    assert not torch.equal(raw(input_ids=ids).logits, raw(input_ids=ids).logits)


def test_the_logits_of_a_batch_never_exist_whole(tokenizer, prompts):
    """TRL#3678: a 0.6B model ran out of 20 GB on its logits. The head sees `chunk_tokens` tokens at most, in
    the backward too.
    """
    model, seen = build_model("llama", tokenizer), []
    decoder, out = rollout_of(model, tokenizer, prompts)
    model.lm_head.register_forward_hook(lambda _module, inputs, _output: seen.append(inputs[0].shape[0]))
    Scorer(model, decoder.tables, chunk_tokens=16)(out, all_rows(out))[0].sum().backward()
    assert max(seen) <= 16
    assert max(seen) - min(seen) <= 1
    assert sum(seen) == 2 * int(out.mask.sum()), "once forward, once again in the backward"


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_compiled_layers_give_the_same_gradients_and_are_compiled_once_for_all(family, tokenizer, prompts):
    model = build_model(family, tokenizer)
    decoder, out = rollout_of(model, tokenizer, prompts)
    weights = torch.randn(out.logp.shape, generator=torch.Generator().manual_seed(0))
    found = []
    for compiled in (False, True):
        model.zero_grad()
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        scorer = Scorer(model, decoder.tables, compiled=compiled)
        for rows in (torch.arange(3), torch.arange(3, 8)):  # sizes that differ
            (scorer(out, rows)[0] * weights[rows]).sum().backward()
        found.append([p.grad.clone() for p in model.parameters()])
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*found, strict=True))
    assert graphs <= 2, f"{graphs}: a layer, and its backward"


def test_gradient_checkpointing_changes_no_gradient(tokenizer, prompts):
    model = build_model("qwen2", tokenizer)
    decoder, out = rollout_of(model, tokenizer, prompts)
    plain = gradients(model, decoder.tables, out, [all_rows(out)])
    model.train().gradient_checkpointing_enable({"use_reentrant": False})
    assert all(
        torch.allclose(a, b, atol=1e-6)
        for a, b in zip(plain, gradients(model, decoder.tables, out, [all_rows(out)]), strict=True)
    )


def test_the_policy_is_in_train_mode_without_dropout_and_its_adapters_are_those_of_the_seed(
    tokenizer, tmp_path
):
    """I11: transformers drops gradient checkpointing in eval() without a word."""
    save_model(build_model("llama", tokenizer), tokenizer, tmp_path / "m", torch.float32)
    assert load_policy(config_for_steps(), str(tmp_path / "m"), tokenizer, "cpu").training
    pytest.importorskip("peft")
    made = []
    for earlier in (1, 2):
        torch.manual_seed(earlier)
        made.append(load_policy(config_for_steps(lora_r=4), str(tmp_path / "m"), tokenizer, "cpu"))
    assert all(torch.equal(a, b) for a, b in zip(*(model.parameters() for model in made), strict=True))
    for name, parameter in made[0].named_parameters():
        if ".lora_B" in name:
            torch.nn.init.normal_(parameter)
    ids = torch.arange(20).view(1, 20)
    assert made[0].training
    assert torch.equal(made[0](input_ids=ids).logits, made[0](input_ids=ids).logits)


def test_threads_load_one_after_the_other(tokenizer, tmp_path, monkeypatch):
    """transformers switches the drawing of weights off for all threads meanwhile: a whole model that was
    loaded in the midst of another's loading `lacked` weights, and a new one would have had none.
    """
    save_model(build_model("llama", tokenizer), tokenizer, tmp_path / "m", torch.float32)
    inside, together, load = [], [], AutoModelForCausalLM.from_pretrained

    def slow(*args, **how):
        inside.append(1)
        together.append(len(inside))
        time.sleep(0.1)
        loaded = load(*args, **how)
        inside.pop()
        return loaded

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", slow)
    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            pool.submit(load_model, str(tmp_path / "m"), tokenizer, torch.float32, "cpu")
    assert together == [1, 1]


def test_a_loaded_model_remembers_the_dtype_it_came_in(tokenizer, tmp_path):
    save_model(build_model("llama", tokenizer), tokenizer, tmp_path / "m", torch.bfloat16)
    assert load_model(str(tmp_path / "m"), tokenizer, torch.float32, "cpu").source_dtype == torch.bfloat16


def test_decay_is_of_matrices_only_and_the_betas_are_in_their_places():
    """After one step of Adam from zero moments: exp_avg = (1 - beta1) g, exp_avg_sq = (1 - beta2) g^2; a bias
    of gradient 0 keeps its value.
    """
    model = torch.nn.Linear(1, 1)
    torch.nn.init.ones_(model.weight), torch.nn.init.ones_(model.bias)
    optimizer, _ = make_optimizer(
        model, config_for_steps(weight_decay=0.5, warmup_ratio=0.0, adam_beta1=0.75, adam_beta2=0.875), 10
    )
    model.weight.grad, model.bias.grad = torch.full((1, 1), 4.0), torch.zeros(1)
    optimizer.step()
    state = optimizer.state[model.weight]
    assert (state["exp_avg"].item(), state["exp_avg_sq"].item()) == (1.0, 2.0)
    assert model.bias.item() == 1
    assert model.weight.item() == pytest.approx(1 - 0.1 * 0.5 - 0.1, abs=1e-5), "lr (decay + 1)"


def test_a_gradient_norm_of_zero_only_measures():
    model = torch.nn.Linear(2, 1, bias=False)
    learner = small_learner(model, max_grad_norm=0.0, warmup_ratio=0.0)
    before, gradients = model.weight.detach().clone(), []
    learner.optimizer.register_step_pre_hook(lambda *_: gradients.append(model.weight.grad.tolist()))
    (model(torch.tensor([[3.0, 4.0]]))).sum().backward()
    assert learner.step([torch.tensor(1.0)]) == (True, 5.0)
    assert gradients == [[[3.0, 4.0]]]
    assert not torch.equal(before, model.weight)


def test_texts_longer_than_the_model_s_positions_are_refused(tokenizer):
    model, problem = build_model("gpt2", tokenizer), SimpleNamespace(ids=[1] * 500)
    check_positions(model, [problem], SimpleNamespace(max_completion_length=12))
    with pytest.raises(SettingError, match="512 positions"):
        check_positions(model, [problem], SimpleNamespace(max_completion_length=13))


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_texts_past_the_length_at_which_positions_change_are_refused(tokenizer, rope_type):
    """The update reads whole texts, and sampled their beginnings with other positions."""
    model, problem = build_model("llama", tokenizer), SimpleNamespace(ids=[1] * 50)
    model.config.rope_parameters = {"rope_type": rope_type, "original_max_position_embeddings": 64}
    check_positions(model, [problem], SimpleNamespace(max_completion_length=14))
    with pytest.raises(SettingError, match="64 positions"):
        check_positions(model, [problem], SimpleNamespace(max_completion_length=15))


def test_a_model_that_is_not_there_is_named_with_what_to_do(tokenizer, tmp_path):
    for name in (str(tmp_path / "nothing"), "no-such-org/no-such-model"):
        with pytest.raises(SettingError, match="give a directory or a hub id") as error:
            load_model(name, tokenizer, torch.float32, "cpu")
        assert name in str(error.value)
        folder = "there is no such folder" if name.startswith("/") else "there is no folder of this name here"
        assert folder in str(error.value)
    (tmp_path / "begun").mkdir()
    with pytest.raises(SettingError, match="begun': holds no config.json, and so no model"):
        load_model(str(tmp_path / "begun"), tokenizer, torch.float32, "cpu")


def edit(path, **values):
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def not_finite(path):
    state = load_file(path)
    save_file({name: value * math.nan for name, value in state.items()}, path, metadata={"format": "pt"})


WRONG_MODELS = {
    "a layer more than there are weights": (
        lambda p: edit(p / "config.json", num_hidden_layers=3),
        "lacks 9 of its weights, model.layers.2",
    ),
    "a list for a config": (lambda p: (p / "config.json").write_text("[]"), "cannot be loaded as a"),
    "a tokenizer of nothing": (
        lambda p: (p / "tokenizer.json").write_text("{}"),
        "cannot be loaded as a Tokenizer",
    ),
    "weights that are NaN": (
        lambda p: not_finite(p / "model.safetensors"),
        "not finite: its weights are damaged",
    ),
    "an EOS id of letters": (
        lambda p: edit(p / "generation_config.json", eos_token_id="x"),
        "eos_token_id holds 'x'",
    ),
    "a list of EOS ids in a list": (
        lambda p: edit(p / "generation_config.json", eos_token_id=[[1]]),
        r"eos_token_id holds \[1\]",
    ),
    "half a generation config": (
        lambda p: (p / "generation_config.json").write_text('{"eos_'),
        "its generation_config.json is damaged: mend it, or delete it",
    ),
    "a dtype of integers": (
        lambda p: edit(p / "config.json", dtype="int8"),
        "names the dtype torch.int8, which no weights have",
    ),
    "a dtype that is none": (lambda p: edit(p / "config.json", dtype=7), "names the dtype 7"),
    "an unknown dtype": (lambda p: edit(p / "config.json", dtype="foo"), "has no attribute 'foo'"),
    "heads that do not divide the width": (
        lambda p: edit(p / "config.json", num_attention_heads=3),
        "cannot be loaded as a",
    ),
    "no layers": (lambda p: edit(p / "config.json", num_hidden_layers=0), "gives it no layers"),
    "letters for a number": (lambda p: edit(p / "config.json", vocab_size="x"), "cannot be loaded as a"),
}


@pytest.mark.parametrize("kind", WRONG_MODELS)
def test_a_model_folder_that_does_not_fit_together_is_one_line(kind, tokenizer, tmp_path):
    """The missing layer was drawn at random and trained; the others ended in tracebacks."""
    do, words = WRONG_MODELS[kind]
    save_model(build_model("llama", tokenizer), tokenizer, tmp_path, torch.float32)
    do(tmp_path)
    with pytest.raises(SettingError, match=words) as error:
        token_tables(
            load_tokenizer(str(tmp_path)), load_model(str(tmp_path), tokenizer, torch.float32, "cpu")
        )
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)


def test_weights_that_the_config_has_no_place_for_are_told(tokenizer, tmp_path):
    """A config.json with a layer less trained half of the model, without a word."""
    save_model(build_model("llama", tokenizer), tokenizer, tmp_path, torch.float32)
    edit(tmp_path / "config.json", num_hidden_layers=1)
    with pytest.warns(UserWarning, match=r"left out 9 weights of its files .* model.layers.1.input_lay"):
        load_model(str(tmp_path), tokenizer, torch.float32, "cpu")


def test_a_saved_model_comes_back_in_its_own_dtype_and_no_half_written_file_is_left(tokenizer, tmp_path):
    """unsloth#1877: the saved model behaved as before training."""
    model = build_model("qwen2", tokenizer)
    save_model(model, tokenizer, tmp_path / "out", torch.bfloat16)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert again.dtype == torch.bfloat16
    assert all(
        torch.equal(a.to(torch.bfloat16), b)
        for a, b in zip(model.parameters(), again.parameters(), strict=True)
    )
    assert not list((tmp_path / "out").glob(".*"))
    assert not list((tmp_path / "out").glob("*.part"))
    assert load_file(tmp_path / "out" / "model.safetensors")


def test_a_tied_head_is_saved_once_and_dropout_as_it_came(tokenizer, tmp_path):
    model = build_model("gpt2", tokenizer)
    model.config.attn_pdrop = 0.3
    model.save_pretrained(tmp_path / "in")
    tokenizer.save_pretrained(tmp_path / "in")
    loaded = load_model(str(tmp_path / "in"), tokenizer, torch.float32, "cpu")
    assert loaded.config.attn_pdrop == 0
    save_model(loaded, tokenizer, tmp_path / "out", torch.bfloat16)
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert again.config.attn_pdrop == 0.3
    assert again.lm_head.weight.data_ptr() == again.transformer.wte.weight.data_ptr()


# LoRA


def with_adapters(family, tokenizer, scale=0.1):
    """A model with adapters that do something, and the plain one it came from."""
    model, plain = build_model(family, tokenizer), build_model(family, tokenizer)
    add_adapters(model, SimpleNamespace(lora_r=4, lora_alpha=8, lora_target_modules=None))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if ".lora_B" in name:
            parameter.data = scale * torch.randn(parameter.shape, generator=generator)
    return model, plain


@pytest.mark.parametrize("family", FAMILIES)
def test_the_sampler_is_the_policy_with_its_adapters_merged(family, tokenizer):
    pytest.importorskip("peft")
    model, copy = with_adapters(family, tokenizer)
    ids = torch.arange(12).view(1, 12)
    assert not torch.allclose(model(ids).logits, copy(ids).logits, atol=1e-2)
    assert float(refresh(copy, model)) > 0.1
    assert torch.allclose(model(ids).logits, copy(ids).logits, atol=1e-4)
    assert float(refresh(copy, model)) == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_only_adapters_are_trained_and_scoring_equals_sampling(family, tokenizer, prompts):
    """I1 with LoRA: rollouts on the merged copy, scoring through base and adapters."""
    pytest.importorskip("peft")
    model, copy = with_adapters(family, tokenizer)
    refresh(copy, model)
    decoder, out = rollout_of(copy, tokenizer, prompts)
    logp, _ = Scorer(model, decoder.tables)(out, all_rows(out))
    assert torch.allclose(logp, out.logp, atol=1e-4)
    logp.sum().backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert trained == {name for name, p in model.named_parameters() if ".lora_" in name}


@pytest.mark.parametrize("package", ["optimum", "some_package_of_its_author"])
def test_a_package_that_is_missing_while_a_model_loads_is_one_line(package, tmp_path):
    """Quantised weights and code that comes with a model need packages; the run ended in a traceback."""
    (tmp_path / "config.json").write_text('{"auto_map": {"AutoConfig": "code.Config"}, "model_type": "own"}')
    (tmp_path / "code.py").write_text(f"import {package}\n")
    with pytest.raises(SettingError, match=f"needs a package that is missing: .*{package}"):
        load_model(str(tmp_path), None, torch.float32, torch.device("cpu"), trust_remote_code=True)


def test_a_saved_model_holds_its_adapters_and_the_adapter_alone_loads_in_peft(tokenizer, tmp_path):
    peft = pytest.importorskip("peft")
    for family in FAMILIES:
        model, plain = with_adapters(family, tokenizer)
        model.source_dropout, ids = {}, torch.arange(12).view(1, 12)
        save_model(model, tokenizer, tmp_path / family, torch.float32)
        save_adapter(model, tmp_path / family / "adapter")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / family)
        assert torch.allclose(again(ids).logits, model(ids).logits, atol=1e-4)
        adapted = peft.PeftModel.from_pretrained(plain, tmp_path / family / "adapter")
        assert torch.allclose(adapted(ids).logits, model(ids).logits, atol=1e-4)


def test_an_adapter_in_the_place_of_a_model_is_refused_with_the_remedy(tokenizer, tmp_path, monkeypatch):
    """Alone it `cannot be loaded as a Tokenizer`; beside weights transformers puts its layers into the model,
    and training ended in a traceback.
    """
    pytest.importorskip("peft")
    model, _ = with_adapters("llama", tokenizer)
    model.source_dropout, folder = {}, tmp_path / "adapter"
    save_adapter(model, folder)
    with pytest.raises(SettingError, match="holds a LoRA adapter.*give the merged model"):
        load_tokenizer(str(folder))
    folder = tmp_path / "both"
    save_model(model, tokenizer, folder, torch.float32)
    save_adapter(model, folder)
    for looked_at in (folder, tmp_path / "none, as of a hub id"):
        monkeypatch.setattr("learning.models.Path", lambda name, found=looked_at: found)
        with pytest.raises(SettingError, match="holds a LoRA adapter"):
            load_model(str(folder), tokenizer, torch.float32, torch.device("cpu"))


def test_a_layer_name_that_no_layer_has_is_one_line(tokenizer):
    pytest.importorskip("peft")
    with pytest.raises(SettingError, match="lora_target_modules="):
        add_adapters(
            build_model("llama", tokenizer),
            SimpleNamespace(lora_r=4, lora_alpha=8, lora_target_modules=["nothing"]),
        )


def test_8_bit_moments_learn_as_float32_ones_do():
    pytest.importorskip("bitsandbytes")
    losses = {}
    for kind in ("adamw", "adamw_8bit"):
        torch.manual_seed(0)
        model, x = torch.nn.Linear(128, 128), torch.randn(64, 128)
        optimizer, _ = make_optimizer(
            model,
            SimpleNamespace(
                optimizer=kind,
                learning_rate=0.01,
                weight_decay=0.0,
                adam_beta1=0.9,
                adam_beta2=0.99,
                warmup_ratio=0.0,
                lr_scheduler_type="constant",
            ),
            50,
        )
        for _ in range(50):
            loss = (model(x) - x).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses[kind] = float(loss)
        moments = {
            state["state1" if kind == "adamw_8bit" else "exp_avg"].dtype
            for p, state in optimizer.state.items()
            if p.ndim == 2
        }
        assert moments == {torch.uint8 if kind == "adamw_8bit" else torch.float32}
    assert losses["adamw_8bit"] == pytest.approx(losses["adamw"], rel=0.1)


@pytest.mark.parametrize("cap", [None, 5.0])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_scores_own_backward_equals_what_autograd_makes_of_the_formula(cap, compiled):
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(6, 23, generator=generator)
    targets, grad = torch.tensor([0, 3, 7, 19, 5, 3]), torch.randn(6, generator=generator)
    cap = None if cap is None else torch.tensor(cap)
    head = Head(torch.tensor(0.7), cap, num_real=20, missing=torch.arange(20) == 11)
    formulas = [torch.compile(f, dynamic=True) if compiled else f for f in (token_scores, logits_gradient)]
    ours, plain = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    logp, entropy = TokenScores.apply(ours, targets, head, formulas)
    wanted, wanted_entropy, _ = token_scores(plain, targets, head)
    (logp * grad).sum().backward()
    (wanted * grad).sum().backward()
    torch.testing.assert_close(
        (logp, entropy, ours.grad), (wanted, wanted_entropy, plain.grad), atol=1e-6, rtol=1e-5
    )
    assert ours.grad[:, 20:].abs().max() == 0
    assert ours.grad[:, 11].abs().max() == 0


def test_a_loss_that_holds_the_entropy_is_refused(tokenizer, prompts):
    """A bonus of any size had no gradient, and the run trained on without it."""
    small = small_update(tokenizer, prompts)
    logp, entropy = small.learner.scorer(small.rollout, [0, 1])
    with pytest.raises(NotImplementedError, match="the entropy is in the loss, but has no gradient here"):
        (logp.sum() - 0.01 * entropy.sum()).backward()


def test_a_model_of_other_layers_than_bitsandbytes_keeps_is_refused(tokenizer, tmp_path):
    """GPT-2's matrices stand the other way round there: what samples would be another model."""
    pytest.importorskip("bitsandbytes")
    build_model("gpt2", tokenizer).save_pretrained(tmp_path / "m")
    config = config_for_steps(model=str(tmp_path / "m"), lora_r=4, load_in_4bit=True)
    with pytest.raises(SettingError, match="load_in_4bit=True: the layers of a gpt2 model are none"):
        load_policy(config, config.model, tokenizer, torch.device("cpu"))
    with pytest.raises(SettingError, match="load_in_4bit=True: has no effect with lora_r=0"):
        config_for_steps(load_in_4bit=True, model=str(tmp_path / "m"))
    with pytest.raises(SettingError, match="load_in_4bit=True: model=tiny is made here"):
        config_for_steps(load_in_4bit=True, lora_r=4, model="tiny")


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])
def test_adapters_on_a_base_in_4_bits_are_scored_as_they_are_sampled_and_saved(
    family, tokenizer, prompts, tmp_path
):
    """What samples, what is scored and what is saved are the same weights: 4-bit ones with the adapters."""
    pytest.importorskip("bitsandbytes")
    build_model(family, tokenizer).save_pretrained(tmp_path / "m")
    config = config_for_steps(model=str(tmp_path / "m"), lora_r=4, load_in_4bit=True, beta=0.1)
    policy, sampler, reference = load_models(config, config.model, tokenizer, torch.device("cpu"))
    before = {name: p.clone() for name, p in sampler.named_parameters()}
    kept = [p for p in policy.parameters() if p.dtype == torch.uint8]
    scales = [x for p in kept for x in (p.quant_state.absmax, p.quant_state.state2.absmax)]
    plain = [p for name, p in policy.named_parameters() if p.dtype != torch.uint8 and ".lora_" not in name]
    held = sum(x.numel() * x.element_size() for x in (*kept, *scales, *plain))
    assert policy_bytes(sampler, config) == pytest.approx(held, rel=0.01)
    assert len(kept) >= 4, "some weights are in 4 bits"
    assert all(p.requires_grad == (".lora_" in name) for name, p in policy.named_parameters())
    with torch.no_grad():
        for name, p in policy.named_parameters():
            if ".lora_B" in name:
                p.normal_(std=0.05)
    refresh(sampler, policy)
    assert any(not torch.allclose(p, before[name], atol=1e-3) for name, p in sampler.named_parameters())
    decoder, out = rollout_of(sampler, tokenizer, prompts, lam=0.3)
    logp, _ = Scorer(policy, decoder.tables)(out, all_rows(out))
    assert torch.allclose(logp, out.logp, atol=3e-5)
    logp.sum().backward()
    assert all(p.grad.abs().sum() > 0 for name, p in policy.named_parameters() if ".lora_A" in name)
    refresh(reference, policy)
    state = merged_state(policy, torch.float32)
    assert state.keys() == reference.state_dict().keys()
    assert all(torch.allclose(state[name], p, atol=1e-6) for name, p in reference.state_dict().items())
