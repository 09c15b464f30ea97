"""Session fixtures: a byte-level BPE tokenizer trained in place and tiny random models of five families.
Offline, one thread.
"""

import gc
import os
import signal

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["GRPO_M3PO_CACHE"] = "none"  # no test finds the warm start of another
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from reporting import evaluation
from small_faults import fault_start  # noqa: F401
from small_models import CHAT_TEMPLATE, CORPUS, FAMILIES, build_model
from small_recipes import recipe_run, recipe_start  # noqa: F401
from small_runs import trained, warm  # noqa: F401

torch.set_num_threads(1)
# a background job begins with SIGINT switched off, and so would the runs that tests interrupt
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish():
    """What the imports made is not looked through again at every collection of garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def unsynced():
    """Checkpoints need not outlive a power cut here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


@pytest.fixture(scope="session")
def tokenizer():
    """About 300 tokens; `</reasoning>` splits, and two EOS ids exist: <|im_end|> and <|endoftext|>."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(CORPUS, trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>", padding_side="left"
    )
    made.chat_template = CHAT_TEMPLATE
    return made


@pytest.fixture(scope="session", params=FAMILIES)
def model(request, tokenizer):
    return build_model(request.param, tokenizer)


@pytest.fixture(scope="session")
def llama(tokenizer):
    return build_model("llama", tokenizer)


@pytest.fixture(scope="session")
def prompts(tokenizer):
    """Five prompts of different lengths, as ids."""
    texts = [
        "Ann has 12 pens.",
        "How many?",
        "Ann has 12 pens and gets 5 more. How many pens does Ann have now?",
        "a",
        "pens and more pens, 12 of them",
    ]
    return [tokenizer(text)["input_ids"] for text in texts]


@pytest.fixture
def undrawn(monkeypatch):
    """Evaluations without their pictures, which take longer than the answers of a small model."""
    monkeypatch.setattr(evaluation, "draw_evaluation", lambda *_: None)
