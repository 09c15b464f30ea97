"""A small model and problems, and settings of a run on them."""

import pytest

import grpo_train
from small_models import a_model_and_problems


@pytest.fixture(scope="session")
def fault_start(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    a_model_and_problems(folder, "llama", tokenizer)
    return folder


def settings_of(fault_start, out, **more):
    small = dict(model=str(fault_start / "model"), dataset=str(fault_start), output_dir=str(out))
    small |= dict(batch_size=2, num_steps=3, num_generations=3, max_completion_length=12)
    small |= dict(eval_every=0, cpu_threads=1, beta=0.0)
    return grpo_train.Config(**{**small, **more})
