"""TRL's GRPOTrainer on the work of speedrun.py: the same model, data, prompts, rewards and minutes, one card.

    python benchmarks/speedrun_trl.py --sampler vllm --model DIR --data FOLDER [--minutes 5] [--seeds 0]
    python benchmarks/speedrun_trl.py --sampler generate ...

The clock is that of the trainer's process, as for ours, and the evaluation comes afterwards. Both begin with
the recipe's supervised start, by sft_train.py within that process: its seconds count alike, and what differs
is GRPO. What the recipe, speedrun_trl.yaml, has of GRPOConfig's settings is taken over, and `--trl_settings
NAME=VALUE ...` changes them: it is ours with the batch and the rate that did best for TRL. On a card: float32
weights under the recipe's autocast, as ours (with LoRA the frozen ones in its dtype, and adapters on every
linear layer of the body, or where the recipe has them); activations are kept, 64 rows at once. The learning
rate falls by the clock where the recipe's does. vLLM is in the trainer's process (colocate); 0.26 goes with
torch 2.11. For the curve the share of right samples is logged, by a reward function of weight 0.
"""

import argparse
import functools
import json
import os
import statistics
import sys
from importlib import metadata
from pathlib import Path

from speedrun import arguments, checked, curve, evaluations, new_until, once, read_steps, recipe_lines
from speedrun import result_rows as mean_rows

from common import ROOT, write_results

IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}


def trl_settings(config, args):
    """GRPOConfig's keyword arguments for a Config of ours."""
    from learning.precision import DTYPES

    rows = config.batch_size * config.num_generations
    at_once = min(64, rows)
    settings = dict(num_generations=config.num_generations, per_device_train_batch_size=at_once)
    settings |= dict(gradient_accumulation_steps=rows // at_once, gradient_checkpointing=False)
    settings |= dict(max_completion_length=config.max_completion_length, temperature=config.temperature)
    settings |= dict(beta=config.beta, num_iterations=config.mu, loss_type=config.loss_type)
    settings |= dict(epsilon=config.epsilon, epsilon_high=config.epsilon_high)
    settings |= dict(scale_rewards=config.scale_rewards)
    settings |= dict(learning_rate=config.learning_rate, weight_decay=config.weight_decay)
    settings |= dict(adam_beta1=config.adam_beta1, adam_beta2=config.adam_beta2, seed=config.seed)
    settings |= dict(max_grad_norm=config.max_grad_norm, max_steps=config.num_steps)
    # as ours has them: with LoRA those of the base are not stepped
    weights = DTYPES["fp32" if args.cpu or not config.lora_r else config.precision]
    settings |= dict(
        model_init_kwargs={"dtype": str(weights).removeprefix("torch.")}, report_to="none", save_strategy="no"
    )
    settings |= dict(logging_steps=1, disable_tqdm=True, use_cpu=args.cpu)
    settings |= {name: config.precision == name and not args.cpu for name in ("bf16", "fp16")}
    if args.sampler == "vllm":
        length = config.max_prompt_length + config.max_completion_length
        settings |= dict(use_vllm=True, vllm_mode="colocate", vllm_gpu_memory_utilization=0.3)
        settings |= dict(vllm_max_model_length=length)
    given = dict(word.split("=", 1) for word in args.trl_settings)
    return settings | {name: json.loads(value) for name, value in given.items()}


def trained(args, seed, out):
    """The process whose clock counts: the supervised start, TRL's GRPO until the minutes are over, saving."""
    sys.path.insert(0, str(ROOT))
    os.environ.update(IN_PROCESS)
    import torch

    from running.launching import seconds_since_start

    end = 60 * args.minutes - args.saving
    config, start = supervised_start(args, seed, out, end)
    trainer, clock = a_trainer(args, config, start, out, end)
    if (seconds := seconds_since_start()) >= end:
        late = f"loading and the supervised start took {seconds:.0f} s"
        raise SystemExit(f"max_wall_minutes={end / 60:.2f}: {late}")
    trainer.train()
    saved_in = torch.float16 if config.precision == "fp16" else torch.bfloat16
    model = trainer.model.merge_and_unload() if config.lora_r else trainer.model
    model.to(saved_in).save_pretrained(out)
    trainer.processing_class.save_pretrained(out)
    saved = seconds_since_start()
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    (out / "trl.json").write_text(json.dumps({"seconds": clock.times, "saved": saved, "logs": logs}))
    print(f"saved after {saved:.1f} s", flush=True)


def supervised_start(args, seed, out, end):
    """The recipe's Config, and the model that GRPO starts from."""
    import grpo_train
    from learning.memory import free_memory
    from running.parsing import combined, settings_from_file
    from running.sft_config import warm_start_settings
    from sft_train import train

    given = dict(model=args.model, dataset=args.data, seed=seed, output_dir=str(out))
    given |= dict(max_wall_minutes=end / 60)
    in_file = settings_from_file(grpo_train.Config, ROOT / args.recipe)
    config = grpo_train.Config(**combined(grpo_train.Config, in_file, given))
    if config.warm_start == "none":
        return config, args.model
    start = train(warm_start_settings(config))
    free_memory()
    return config, str(start)


def a_trainer(args, config, start, out, end):
    """The GRPOTrainer, and the Clock that ends the training."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from grpo_train import chosen_rewards
    from learning.models import load_tokenizer
    from problems.prompts import prepare_problems

    tokenizer = load_tokenizer(start)
    problems, _, _ = prepare_problems(config, tokenizer)
    rows = [{"prompt": p.prompt, "answer": p.problem.answer} for p in problems]
    functions, weights = zip(*chosen_rewards(config), (right, 0.0), strict=True)
    functions = [told_format(function, config.answer_format) for function in functions]
    settings = trl_settings(config, args) | dict(output_dir=str(out / "trl"), reward_weights=list(weights))
    how = dict(args=GRPOConfig(**settings), train_dataset=Dataset.from_list(rows))
    if config.lora_r:
        how["peft_config"] = adapters(config)
    trainer = with_our_rates(GRPOTrainer, config, end)(start, functions, processing_class=tokenizer, **how)
    clock = a_clock(end)
    trainer.add_callback(clock)
    return trainer, clock


def adapters(config):
    """The LoraConfig of a Config of ours."""
    from peft import LoraConfig

    where = config.lora_target_modules or "all-linear"
    return LoraConfig(
        r=config.lora_r, lora_alpha=config.lora_alpha, target_modules=where, task_type="CAUSAL_LM"
    )


def with_our_rates(trainer, config, end):
    """A trainer class whose learning rate is by our curve, which may fall to 0 at the end of the minutes."""
    from torch.optim.lr_scheduler import LambdaLR

    from learning.learner import rate_curve
    from running.launching import seconds_since_start

    class WithOurRates(trainer):
        def create_scheduler(self, num_training_steps, optimizer=None):
            if self.lr_scheduler is None:
                how = config.lr_scheduler_type, config.warmup_ratio, num_training_steps
                curve = rate_curve(*how, lambda: seconds_since_start() / end)
                self.lr_scheduler = LambdaLR(optimizer or self.optimizer, curve)
            return self.lr_scheduler

    return WithOurRates


def told_format(function, answer_format):
    """A reward function that is told the format of the answers, as our loop tells it and TRL's does not."""

    @functools.wraps(function)
    def told(**columns):
        return function(**columns, answer_format=answer_format)

    return told


def right(completions, answer, answer_format, **kwargs):
    """1.0 for a right answer: what `correct` is in our log."""
    from rewards import right_answers

    return [float(bool(verdict)) for verdict in right_answers(completions, answer, answer_format)]


def a_clock(end):
    """A callback that ends the training in time, and remembers when each step ended."""
    from transformers import TrainerCallback

    from running.launching import seconds_since_start

    class Clock(TrainerCallback):
        def __init__(self):
            self.times = []

        def on_train_begin(self, *args, **kwargs):
            self.times.append(seconds_since_start())

        def on_step_end(self, training, state, control, **kwargs):
            self.times.append(seconds_since_start())
            step = self.times[-1] - self.times[-2]
            control.should_training_stop |= self.times[-1] + step >= end

        def on_log(self, training, state, control, logs=None, **kwargs):
            if "reward" in logs:
                print(f"step {state.global_step} reward {float(logs['reward']):.3f}", flush=True)

    return Clock()


def read_note(out):
    return json.loads((out / "trl.json").read_text())


def summary(out, batch):
    """(metric, value, unit) of one seed's run; batch: completions of a step."""
    note, warm = read_note(out), out / "warm_start"
    began, *ends = note["seconds"]
    supervised = read_steps(warm)[-1]["train_seconds"] if warm.exists() else 0.0
    silent = [float(entry["frac_reward_zero_std"]) for entry in note["logs"]]
    return [
        ("seconds", round(note["saved"], 1), "s"),
        ("warm_start_seconds", round(supervised, 1), "s"),
        ("seconds_to_first_step", round(began, 1), "s"),
        ("grpo_seconds", round(ends[-1] - began, 1), "s"),
        ("steps", len(ends), "steps"),
        ("completions_per_s", round(len(ends) * batch / (ends[-1] - began), 1), "completions/s"),
        ("dead_groups", round(statistics.fmean(silent), 4), "share"),
    ]


def main():
    parser = arguments(__doc__.splitlines()[0], "benchmarks/speedrun_trl.yaml")
    parser.add_argument("--sampler", choices=["vllm", "generate"], required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--cpu", action="store_true", help="without a card, to try it out")
    others = dict(nargs="*", default=[], metavar="NAME=VALUE", help="settings of GRPOConfig, values in JSON")
    parser.add_argument("--trl_settings", **others)
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)  # the seed of the timed process
    args = checked(parser)
    name = f"speedrun_trl_{args.sampler}"
    if args.process is not None:
        return trained(args, args.process, args.work / f"{name}_{args.process}")
    import yaml

    settings = yaml.safe_load("\n".join(recipe_lines(args)))
    if settings.get("ema_decay"):
        parser.error(f"--recipe {args.recipe}: TRL keeps no average of the weights: leave out ema_decay")
    batch = settings["batch_size"] * settings["num_generations"]
    runs, reports, curves, new, cards = {}, {}, {}, {}, []
    for seed in args.seeds:
        out = args.work / f"{name}_{seed}"
        words = [f"benchmarks/{Path(__file__).name}", *sys.argv[1:], "--process", seed]
        made = once(words, out, args, recipe_lines(args), lambda: read_note(out)["saved"])  # noqa: B023
        cards.append(made["card"])
        runs[seed] = summary(out, batch)
        reports[seed] = evaluations(out, f"{name}_{seed}", args)
        note = read_note(out)
        shares = [float(entry["rewards/right/mean"]) for entry in note["logs"]]
        label = f"TRL with {args.sampler}, seed {seed}"
        curves[label] = curve(note["seconds"][1:], shares)
        new[label] = new_until(note["seconds"][1:], [float(entry["epoch"]) for entry in note["logs"]])
    more = dict(recipe=recipe_lines(args), curves=curves, new_until=new, cards=cards)
    more["trl_settings"] = args.trl_settings
    if args.sampler == "vllm":
        more["vllm"] = metadata.version("vllm")
    write_results(name, mean_rows(f"speedrun-{args.minutes:g}min", reports, runs), **more)


if __name__ == "__main__":
    main()
