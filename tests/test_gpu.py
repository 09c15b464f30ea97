"""What only a GPU can show: bf16 sampling against bf16-autocast scoring, and the plain facts of the CPU tests on the card. `pytest -m gpu`"""

import pytest
import torch

from conftest import build_model
from data import pad_left
from generation import GroupDecoder, Interaction, rollout_uniforms
from training import Scorer, refresh

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
T = 32


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3", "gpt2"])
@torch.no_grad()
def test_greedy_decoding_in_float32_equals_generate_on_the_card(family, tokenizer, prompts):
    model = build_model(family, tokenizer).cuda()
    decoder = GroupDecoder(model, tokenizer)
    for (ids, _), prompt in zip((a[0] for a in decoder.complete(prompts, T)), prompts, strict=True):
        beyond = list(range(len(tokenizer), model.config.vocab_size))
        row = torch.tensor([prompt], device="cuda")
        made = model.generate(input_ids=row, attention_mask=torch.ones_like(row), max_new_tokens=T, do_sample=False, suppress_tokens=beyond)[
            0, len(prompt) :
        ].tolist()
        end = next((i + 1 for i, token in enumerate(made) if token in decoder.tables.eos_ids), len(made))
        assert ids == made[:end]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3", "gpt2"])
@torch.no_grad()
def test_bf16_scoring_is_close_to_bf16_sampling_and_far_from_scoring_plain_ids(family, tokenizer, prompts):
    policy = build_model(family, tokenizer).cuda()
    sampler = build_model(family, tokenizer, dtype=torch.bfloat16).cuda()
    refresh(sampler, policy)
    decoder = GroupDecoder(sampler, tokenizer, "e", Interaction(0.3))
    ids, mask = pad_left(prompts, decoder.tables.pad_id)
    out = decoder.rollout(ids, mask, 8, T, rollout_uniforms(0, 0, 0, 8 * len(prompts), T))
    rows, scorer = torch.arange(len(out.ids), device="cuda"), Scorer(policy, decoder.tables, bf16=True)
    close = (scorer(out, rows)[0] - out.logp).abs()[out.mask].mean()
    out.mix = None
    assert close < 0.03
    assert (scorer(out, rows)[0] - out.logp).abs()[out.mask].mean() > 5 * close
