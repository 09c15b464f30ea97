"""The grader of MATH answers on a corpus whose verdicts are known by construction, and its peers beside it.

    python benchmarks/math_grading.py --data FOLDER [--peers 300]

The 500 answers of MATH-500 against themselves, against each other, and against what the forty rules of
math_rules.py make of them, thirty that keep the value and ten that change it, and two rules in a row. --peers
puts a seeded sample of each case to math-verify, and to the two graders of lm-evaluation-harness's
minerva_math where it is installed (`pip install --no-deps lm-eval antlr4-python3-runtime==4.11.1`).
"""

import argparse
import importlib.util
import json
import logging
import random
import sys
import time
from collections import Counter
from functools import partial
from importlib import metadata
from itertools import combinations, product
from pathlib import Path
from typing import NamedTuple

import math_rules
from common import ROOT, write_results

sys.path.insert(0, str(ROOT))
from answers.maths import all_math_equal


class Pair(NamedTuple):
    rule: str
    answer: str
    reference: str
    is_equal: bool


# Answers of MATH-500 that are equal in value, or equal but for a unit, in two spellings. They are no pairs of
# `math-500-others`: all other answers that differ in more than blanks are different objects.
EQUAL = (
    {"5", "x=5"},  # the value of x
    {"42", "52_8"},  # 5 * 8 + 2
    {"36", "40_9", r"36^\circ", r"\$36"},  # 4 * 9; a unit
    {"54", "204_5"},  # 2 * 25 + 4
    {"15", r"15\mbox{ cm}^2"},
    {"90", r"90^\circ"},
    {"120", r"120^\circ"},
    {"30", r"30^\circ"},
    {"10080", r"10,\!080"},
    {"1,-2", "-2,1"},  # sets
    {r"\frac14", r"\frac{1}{4}"},
)


def are_equal(one, two):
    return one.replace(" ", "") == two.replace(" ", "") or any({one, two} <= group for group in EQUAL)


def read_answers(folder):
    """The answers of MATH-500, from FOLDER/test.jsonl."""
    lines = (Path(folder) / "test.jsonl").read_text().splitlines()
    return [json.loads(line)["answer"] for line in lines]


def corpus(answers, others, seed=0):
    """{case: [Pair, ...]}, each pair once.

    A sample of the pairs of two different answers, and eight pairs of each two rules in a row.
    """
    draw, texts = random.Random(seed), list(dict.fromkeys(answers))
    apart = [pair for pair in combinations(texts, 2) if not are_equal(*pair)]
    apart = draw.sample(apart, min(others, len(apart)))
    same = [Pair("same", text, text, True) for text in texts]
    # MATH-500 has two answers with a unit's power, so thirty whole numbers are given one for that rule.
    areas = [rf"{text}\text{{ cm}}^2" for text in texts if text.isdecimal()][:30]
    rewritten = made_by(math_rules.KEEPING, same, True)
    changed = made_by(math_rules.CHANGING, same, False)
    changed += made_by([math_rules.unit_power], [Pair("same", text, text, True) for text in areas], False)
    twice = {}
    for pair in made_by(math_rules.KEEPING, rewritten, True) + made_by(math_rules.KEEPING, changed, False):
        twice.setdefault(pair.rule, []).append(pair)
    return {
        "math-500-same": same,
        "math-500-others": [Pair("others", *draw.sample(pair, 2), False) for pair in apart],
        "math-500-rewritten": rewritten,
        "math-500-changed": changed,
        "math-500-twice": [
            pair for pairs in twice.values() for pair in draw.sample(pairs, min(8, len(pairs)))
        ],
    }


def made_by(rules, pairs, is_equal):
    """What the rules make of the answers of pairs, beside the same references."""
    made = {}
    for rule, pair in product(rules, pairs):
        other = None if rule.__name__ == pair.rule else math_rules.applied(rule, pair.answer)
        if other is not None and not (is_equal and other == pair.reference):
            name = rule.__name__ if pair.rule == "same" else f"{pair.rule} + {rule.__name__}"
            made.setdefault((other, pair.reference), Pair(name, other, pair.reference, is_equal))
    return list(made.values())


def measure(name, pairs, grade):
    """The rows of a case, and the pairs that were judged wrongly or not at all, with the verdicts."""
    started = time.perf_counter()
    verdicts = grade([pair.answer for pair in pairs], [pair.reference for pair in pairs])
    seconds = time.perf_counter() - started
    judged = list(zip(pairs, verdicts, strict=True))
    failing = [(pair, verdict) for pair, verdict in judged if verdict is not pair.is_equal]
    rows = [(name, "pairs", len(pairs), "pairs")]
    for metric, is_equal in (("refused", True), ("paid_wrongly", False)):
        verdicts_of_kind = [verdict for pair, verdict in judged if pair.is_equal == is_equal]
        if verdicts_of_kind:
            wrong = sum((verdict is True) != is_equal for verdict in verdicts_of_kind)
            rows.append((name, metric, round(wrong / len(verdicts_of_kind), 5), "share"))
    undecided = sum(verdict is None for verdict in verdicts) / len(pairs)
    rows.append((name, "undecided_share", round(undecided, 5), "share"))
    return [*rows, (name, "pairs_per_s", round(len(pairs) / seconds, 1), "pairs/s")], failing


def show_failing(name, pairs, failing):
    """How many pairs of each rule failed, and the first of them."""
    total = Counter(pair.rule for pair in pairs)
    counts = Counter(pair.rule for pair, _ in failing)
    print(f"{name}: {len(failing)} of {len(pairs)} pairs fail")
    for rule, count in counts.most_common():
        print(f"  {rule}: {count} of {total[rule]}")
        for pair, verdict in [(pair, verdict) for pair, verdict in failing if pair.rule == rule][:20]:
            print(f"    {pair.answer:<50} for {pair.reference:<40} {verdict}")


def as_mathematics(text):
    """A text in dollar signs, its full stop behind them; one that has delimiters of its own as it is."""
    if math_rules.DELIMITERS.search(text):
        return text
    return f"${text.removesuffix('.')}${'.' * text.endswith('.')}"


def peer_graders():
    """{name: function from two texts to a verdict} of the peers that are installed."""
    from math_verify import parse, verify

    logging.disable(logging.CRITICAL)  # both write a line for every text that they cannot read

    def by_math_verify(answer, gold):
        return verify(parse(as_mathematics(gold)), parse(as_mathematics(answer)))

    graders = {"math-verify": by_math_verify}
    package = importlib.util.find_spec("lm_eval")
    if package is None:
        print("minerva_math is left out: lm-eval is not installed")
        return graders
    # The package imports much that is not needed here, so the task's one file is loaded.
    file = Path(package.origin).parent / "tasks" / "minerva_math" / "utils.py"
    spec = importlib.util.spec_from_file_location("minerva_math", file)
    minerva = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(minerva)

    def by_minerva(metric, answer, gold):
        document = {"answer": minerva.normalize_final_answer(gold), "solution": rf"\boxed{{{gold}}}"}
        text = f"Final Answer: The final answer is {as_mathematics(answer)}. I hope it is correct."
        return minerva.process_results(document, [text])[metric] == 1

    graders["minerva_math"] = partial(by_minerva, "exact_match")
    graders["minerva_math's math_verify"] = partial(by_minerva, "math_verify")
    return graders


def measure_peers(cases, size, seed=0):
    rows = []
    for peer, grade in peer_graders().items():
        for name, pairs in cases.items():
            sample = random.Random(seed).sample(pairs, min(size, len(pairs)))
            found, failing = measure(
                f"{name} {peer}", sample, lambda a, b, grade=grade: list(map(grade, a, b))
            )
            show_failing(f"{name} {peer}", sample, failing)
            rows += found
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="folder with MATH-500's test.jsonl")
    parser.add_argument("--others", type=int, default=50_000, help="at most so many pairs of two answers")
    parser.add_argument("--peers", type=int, default=0, help="pairs of each case that peers grade too")
    args = parser.parse_args()
    cases = corpus(read_answers(args.data), args.others)
    all_math_equal(["x+1"], ["1+x"])  # starts what is started once a process
    rows, failed = [], []
    for name, pairs in cases.items():
        found, failing = measure(name, pairs, all_math_equal)
        show_failing(name, pairs, failing)
        rows += found
        failed += [{"case": name, **pair._asdict(), "verdict": verdict} for pair, verdict in failing[:30]]
    if args.peers:
        rows += measure_peers(cases, args.peers)
    packages = ["math-verify", "sympy", *(["lm-eval"] if importlib.util.find_spec("lm_eval") else [])]
    versions = {name: metadata.version(name) for name in packages}
    write_results("math_grading", rows, graders=versions, failing=failed)


if __name__ == "__main__":
    main()
