"""A study's folder as grpo_study.py leaves it, with answers that are drawn instead of sampled from a model.

python tests/small_study.py OUT [--arms 9] [--seeds 8] [--questions 1319]
"""

import argparse
import gzip
import json
import sys
from pathlib import Path

import numpy as np

CONFIRMATORY = ("grpo", "m3po", "scaled_mean", "noise", "strangers")
VERDICT = {
    "treatment": "m3po",
    "baseline": "grpo",
    "controls": ["noise", "strangers"],
    "averaging": "scaled_mean",
}


def an_evaluation(name, steps, samples, temperature=1.0, **more):
    values = dict(name=name, steps=steps, samples=samples, temperature=temperature, interacts=False)
    values |= dict(dataset="gsm8k", split="test", answer_format="xml", max_completion_length=256)
    return values | more


def a_plan(arms=CONFIRMATORY, seeds=range(8), steps=(65, 70, 75, 80), **more):
    """A plan with the first five arms as confirmatory ones, and those after them as exploratory ones."""
    seeds = list(seeds)
    plan = {
        "schema": 1,
        "name": "does M3PO help",
        "text": "# Does M3PO help?\n\nArms, endpoints <and> the tests, as they were *registered*.\n",
        "baseline": arms[0],
        "treatment": arms[1],
        "arms": [
            {
                "name": arm,
                "settings": {"m3po_lambda": 0.1, "m3po_similarity": arm} if i else {"m3po_lambda": 0.0},
                "role": "confirmatory" if arm in CONFIRMATORY else "exploratory",
                "seeds": seeds if arm in CONFIRMATORY else seeds[:4],
            }
            for i, arm in enumerate(arms)
        ],
        "seeds": seeds,
        "evaluations": [
            an_evaluation("sampled", list(steps), 8),
            an_evaluation("greedy", list(steps), 1, temperature=0.0),
        ],
        "primary": {"evaluation": "sampled"},
        "secondary": [
            {"evaluation": "greedy", "measure": "mean"},
            {"evaluation": "sampled", "measure": "maj"},
            {"evaluation": "sampled", "measure": "pass"},
        ],
        "margin": 0.01,
        "alpha": 0.05,
        "effect": 0.015,
        "power": 0.8,
        "fewest_seeds": 8,
        "most_seeds": 16,
        "look_after": 6,
        "verdict": VERDICT if set(CONFIRMATORY) <= set(arms) else None,
    }
    return plan | more


def write_json(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(value, separators=(",", ":"))
    path.write_bytes(gzip.compress(text.encode(), mtime=0) if path.suffix == ".gz" else text.encode())


def write_answers(folder, evaluation, step, right, votes=None, lengths=None):
    """The answers of a run at a step: right (Q, S)."""
    right = np.asarray(right)
    answers = {"evaluation": evaluation, "step": step, "questions": [f"q{i}" for i in range(len(right))]}
    answers |= {
        "right": right.tolist(),
        "lengths": (right * 0 + 100 if lengths is None else lengths).tolist(),
    }
    answers |= {"votes": (1 - right if votes is None else votes).tolist()}
    write_json(folder / "answers" / f"{evaluation}-{step}.json.gz", answers)


def write_run(out, seed, arm, status="finished", step=80, **more):
    """run.json of a run; returns its folder."""
    folder = out / "runs" / str(seed) / arm
    record = dict(arm=arm, seed=seed, start_hash=f"start{seed}", code_hash="code", status=status, step=step)
    write_json(folder / "run.json", record | dict(seconds=120.0, reason=None) | more)
    return folder


def write_metrics(folder, gain, steps, generator):
    values = 0.3 + gain + 0.1 * np.linspace(0, 1, steps) + generator.normal(0, 0.02, steps)
    lines = [
        {
            "step": i + 1,
            "reward": 2 * value,
            "correct": value,
            "completion_length": 120.0 - i / 4,
            "entropy": 0.5 - i / 400,
            "train_seconds": 2.0 * (i + 1),
            "gate_entropy": 0.7,
            "gate_same_token": 0.4,
            "gate_mean_cosine": 0.87,
        }
        for i, value in enumerate(values)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_fake_study(out, plan, gains, questions=1319, spread=0.012, train_steps=80):
    """Fill a folder: each arm's accuracy is 0.35 plus its gain, plus what its seed adds (`spread`)."""
    out = Path(out)
    write_json(out / "plan.json", plan)
    easy = np.random.default_rng(0).beta(0.7, 1.3, questions)
    for seed in plan["seeds"]:
        write_json(
            out / "starts" / f"{seed}.json",
            dict(seed=seed, start_hash=f"start{seed}", code_hash="code", accuracy=0.28, seconds=60.0),
        )
        for number, arm in enumerate(plan["arms"]):
            if seed not in arm["seeds"]:
                continue
            generator = np.random.default_rng([seed, number])
            gain = gains.get(arm["name"], 0.0) + generator.normal(0, spread)
            chance = np.clip(easy + gain, 0, 1)[:, None]
            folder = write_run(out, seed, arm["name"])
            for evaluation in plan["evaluations"]:
                for step in evaluation["steps"]:
                    shape = (questions, evaluation["samples"])
                    right = (generator.random(shape) < chance).astype(int)
                    votes = np.where(right, 0, generator.integers(1, 6, shape))
                    lengths = generator.poisson(110, shape)
                    write_answers(folder, evaluation["name"], step, right, votes, lengths)
            write_metrics(folder, gain, train_steps, generator)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out")
    parser.add_argument("--arms", type=int, default=9)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--questions", type=int, default=1319)
    args = parser.parse_args()
    arms = (*CONFIRMATORY, "own", "plain", "lambda_0.3", "credit")[: args.arms]
    plan = a_plan(arms, range(args.seeds))
    plan["evaluations"].append(an_evaluation("interacting", [80], 8, interacts=True))
    plan["evaluations"].append(an_evaluation("math500", [80], 1, 0.0, dataset="math", answer_format="boxed"))
    plan["secondary"] += [
        {"evaluation": "interacting", "measure": "mean"},
        {"evaluation": "math500", "measure": "mean"},
        {"evaluation": "sampled", "measure": "length"},
        {"evaluation": "sampled", "measure": "mean", "steps": {"treatment": 75, "baseline": 80}},
    ]
    gains = {"m3po": 0.03, "scaled_mean": 0.02, "noise": -0.005}
    write_fake_study(args.out, plan, gains, args.questions)


if __name__ == "__main__":
    sys.exit(main())
