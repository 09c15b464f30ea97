"""Tiny random models of five families, and what tests make of them."""

import json
import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
)

from rewards import compute_rewards
from running.folder import save_model

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


CORPUS = [
    "Respond in the following format: <reasoning> ... </reasoning> <answer> ... </answer>",
    "Ann has 12 pens and gets 5 more. How many pens does Ann have now? 12 + 5 = 17. #### 17 \\boxed{17}",
] * 20


EXTRA_IDS = 7  # the models' heads are wider than the tokenizer, as Qwen's is


SMALL = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
)


FAMILIES = ["llama", "qwen2", "qwen3", "gemma3", "gpt2"]


def build_model(family, tokenizer, seed=0, dtype=torch.float32):
    """A random two-layer model whose logits are lively enough to give varied text."""
    ids = dict(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None)
    shared = dict(
        vocab_size=len(tokenizer) + EXTRA_IDS, max_position_embeddings=512, initializer_range=0.15, **ids
    )
    config = {
        "llama": lambda: LlamaConfig(**SMALL, **shared),
        "qwen2": lambda: Qwen2Config(**{k: v for k, v in SMALL.items() if k != "head_dim"}, **shared),
        "qwen3": lambda: Qwen3Config(**SMALL, **shared),
        "gemma3": lambda: Gemma3TextConfig(
            **SMALL, **shared, sliding_window=8, layer_types=["sliding_attention", "full_attention"]
        ),
        "gpt2": lambda: GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=512, **shared),
    }[family]()
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    model.generation_config.eos_token_id = [
        tokenizer.convert_tokens_to_ids("<|im_end|>"),
        tokenizer.convert_tokens_to_ids("<|endoftext|>"),
    ]
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def with_layers(model, count):
    """The model with its first layers alone, for runs that need no more."""
    model.model.layers, model.config.num_hidden_layers = model.model.layers[:count], count
    if model.config.to_dict().get("layer_types"):
        model.config.layer_types = model.config.layer_types[:count]
    return model


def paid(functions, prompts, completions, step=None, gather=list, timeout=0.0, **columns):
    """compute_rewards, its columns spelt out."""
    return compute_rewards(
        functions, dict(prompts=prompts, completions=completions, **columns), step, gather, timeout
    )


def a_model_and_problems(folder, family, tokenizer):
    """A small random model in folder/model, and 30 problems with solutions beside it."""
    model = with_layers(build_model(family, tokenizer), 1)
    save_model(model, tokenizer, folder / "model", torch.float32)
    rows = [
        {"question": f"What is {i} and {i}?", "answer": f"It is {2 * i}.\n#### {2 * i}"} for i in range(1, 31)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder
