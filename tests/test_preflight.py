"""--check."""

import copy
import json
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
from tokenizers import normalizers

import grpo_train
import sft_train
from decoding.decoder import GroupDecoder
from decoding.rollout import Interaction, Sampling, rollout_uniforms
from errors import DataError, SettingError
from running import preflight
from running.preflight import predicted_peak
from running.settings import refuse_at_once
from small_faults import settings_of
from small_models import CHAT_TEMPLATE
from small_update import small_update


def check(config, capsys):
    grpo_train.preflight.report(config, grpo_train.chosen_rewards(config))
    return capsys.readouterr().out


SAID = [
    "findings (2):\n  pass rate 0.000: nothing is right",
    "of the completions are cut off: --max_completion_length 12 is short",
    "<|im_start|>assistant\\n'\n",
    "a completion ends on: ['<|endoftext|>', '<|im_end|>'] or after 12 tokens",
    "26 to train on, 4 held out, 0 skipped",
    "2 problems x 3 = 6 completions",
    "3 steps = 18 completions",
    "memory, GiB: policy",
    "peak: not measured without a GPU; keys and values of 6 rows take 0.00 GiB at their limit",
    "a checkpoint:",
    "gold answers: 26 of 26 earn 2.8",
    "near misses of",
    "two answers 0.8",
    "nothing 0",
    "pass rate: 0.000 on 26 problems x 3",
    "Begin with --warm_start",
]


def test_the_check_says_what_a_run_would_do_and_leaves_nothing(fault_start, tmp_path, capsys):
    printed = check(settings_of(fault_start, tmp_path / "out", eval_problems=4, eval_every=2), capsys)
    for words in SAID:
        assert words in printed, words
    assert printed.startswith("findings")
    assert "batch_size:" not in printed, "settings are asked for with -v"
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.iterdir())


def test_a_check_in_a_folder_in_use_reports_it_and_checks_all_the_same(fault_start, tmp_path, capsys):
    """After the first command of the README the --check of docs/recipes.md was refused, for it uses the same
    folder; the warm start that lies there is another run's."""
    out = tmp_path / "out"
    (out / "warm_start").mkdir(parents=True)
    for name in ("run_config.yaml", "finished.json", "warm_start/warm_start.json"):
        (out / name).write_text("{}")
    settings = dict(warm_start="configs/tiny_warm_start.yaml", max_completion_length=60)
    config = settings_of(fault_start, out, check=True, **settings)
    refuse_at_once(config)
    printed = check(config, capsys)
    assert f"  output_dir='{out}' holds a run already: choose another" in printed
    assert "gold answers: 30 of 30 earn 2.8" in printed
    assert "a warm start comes first" in printed
    with pytest.raises(SettingError, match="holds a run already"):
        refuse_at_once(settings_of(fault_start, out, **settings))


def test_the_settings_and_the_whole_prompt_are_shown_with_v(fault_start, tmp_path, capsys):
    printed = check(settings_of(fault_start, tmp_path / "out", check=True, verbose=True), capsys)
    assert printed.startswith("findings")
    assert "\nbatch_size: 2\n" in printed
    assert "\nthe first prompt:\n<|im_start|>system\nRespond in the following format" in printed


def test_what_a_refused_check_has_found_is_shown_before_the_refusal(fault_start, tmp_path, capsys):
    (tmp_path / "words.jsonl").write_text('{"question": "Who?", "answer": "<answer> no </answer>"}\n' * 3)
    settings = dict(dataset=str(tmp_path / "words.jsonl"), learning_rate=0.0, epsilon=0.3)
    with pytest.raises(SettingError, match="no reference answer of this data is right .* reads '<reasoning>"):
        check(settings_of(fault_start, tmp_path / "out", **settings), capsys)
    printed = capsys.readouterr().out
    assert "findings (3):\n  with mu=1 the ratio is always 1" in printed, (
        "what the run notes, the check finds"
    )
    assert "\n  every learning rate is 0" in printed


def test_a_refused_check_never_says_that_nothing_was_found(fault_start, tmp_path, capsys):
    """`findings: none` stood above `line 17: has no answer`."""
    (tmp_path / "mine.jsonl").write_text('{"questoin": "Who?", "answer": "1"}\n')
    with pytest.raises(DataError, match="has no question"):
        check(settings_of(fault_start, tmp_path / "out", dataset=str(tmp_path / "mine.jsonl")), capsys)
    assert capsys.readouterr().out == ""


def checked(config, function):
    return grpo_train.preflight.report(config, [(function, 1.0)])


def right_number(completions, answer, **columns):
    return [float(gold in chat[0]["content"]) for chat, gold in zip(completions, answer, strict=True)]


def test_rewards_that_pay_nothing_are_blamed_themselves_and_not_the_format(fault_start, tmp_path, capsys):
    """A reward that compared a whole chat with the answer paid 0 for all; `--grading` was the advice."""
    config = settings_of(fault_start, tmp_path / "out")
    with pytest.raises(SettingError, match="^reward_set=.*a right answer earns 0, and an empty completion 0"):
        checked(config, lambda completions, answer, **_: [0.0 for _ in answer])
    printed = capsys.readouterr().out
    assert " count as right" in printed
    assert "earns as much as" not in printed, "nothing earns anything"


def test_a_wrong_answer_that_is_paid_in_full_is_shown(fault_start, tmp_path, capsys):
    """`another answer earns as much: the rewards teach nothing` was said of 527, which contains 52."""
    checked(settings_of(fault_start, tmp_path / "out"), right_number)
    printed = capsys.readouterr().out
    assert re.search(r"the answer '(\d+)7' earns as much as '\1': the rewards do not tell them", printed)
    assert "teach nothing" not in printed


def test_one_of_several_rewards_that_does_not_read_the_text_is_named(fault_start, tmp_path, capsys):
    """`"yes" in completion` pays 0 for everything; beside a reward that works nobody was told. What pays
    reference answers unevenly was not named either."""

    def broken(completions, **_):
        return [float("yes" in completion) for completion in completions]

    def brief(completions, **_):
        return [1 - len(completion[0]["content"]) / 1000 for completion in completions]

    def picky(completions, answer, **columns):
        right = right_number(completions, answer, **columns)
        return [paid * (int(gold) % 3) for paid, gold in zip(right, answer, strict=True)]

    config = settings_of(fault_start, tmp_path / "out")
    preflight.report(config, [(right_number, 1.0), (broken, 0.5), (brief, 0.1), (picky, 0.3)])
    printed = capsys.readouterr().out
    findings = printed.partition("\n\n")[0]
    assert re.search(r"\d+ of 30 reference answers earn less .*: picky does not pay them alike", findings)
    assert re.search(r"\n    train-\d+ \('.*'\): '\d+' earns ", printed), "an id alone is in no file"
    assert "the reward broken pays 0 for right, wrong and empty texts alike: does it read" in findings
    assert "the reward brief" not in findings


def test_a_reward_that_reads_the_text_alone_need_not_pay_reference_answers_alike(
    fault_start, tmp_path, capsys
):
    """`27 of 30 reference answers earn less than 0.95` stood first in the check of a reward for length."""

    def longer(completions, **_):
        return [len(completion[0]["content"]) / 1000 for completion in completions]

    checked(settings_of(fault_start, tmp_path / "out"), longer)
    printed = capsys.readouterr().out
    assert "gold answers: " in printed
    assert "earn less" not in printed


def test_a_reward_that_needs_what_the_data_lacks_is_refused_as_the_run_refuses_it(fault_start, tmp_path):
    """The check called it, and named a line of rewards.py."""
    with pytest.raises(SettingError, match="needs ground_truth, which is not among answer, answer_format, "):
        checked(settings_of(fault_start, tmp_path / "out"), lambda completions, ground_truth: [])


def test_data_that_a_warm_start_cannot_learn_from_are_refused_by_the_check(tmp_path, capsys):
    """The check passed, and the run was refused: a file of questions and answers has no worked solutions."""
    rows = [{"question": f"What is {n} and 1 ?", "answer": str(n + 1)} for n in range(8)]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = dict(model="tiny", dataset=str(tmp_path / "mine.jsonl"), eval_every=0)
    settings |= dict(warm_start="configs/tiny_warm_start.yaml", output_dir=str(tmp_path / "out"))
    with pytest.raises(DataError, match="train-0 has no worked solution .* --warm_start none"):
        check(grpo_train.Config(**settings), capsys)


def test_a_check_ends_when_its_minute_is_over(fault_start, tmp_path, capsys, monkeypatch):
    """32 groups of long completions took a small machine hours, without a word on the pass rate."""
    config, seen = settings_of(fault_start, tmp_path / "out"), []
    whole, rollout = check(config, capsys), GroupDecoder.rollout

    def watched(decoder, prompts, *given, **how):
        seen.append(len(prompts))
        if len(seen) == 3:
            over = SimpleNamespace(monotonic=lambda: float("inf"))
            monkeypatch.setattr(preflight, "time", over)
        return rollout(decoder, prompts, *given, **how)

    monkeypatch.setattr(GroupDecoder, "rollout", watched)
    assert "30 of 30 earn 2.8" in whole
    with monkeypatch.context() as patch:
        patch.setattr(preflight, "GOLD_SECONDS", 0)
        printed = check(config, capsys)
    assert seen == [1, 2, 4], "the time is over during the third part, which is left out"
    assert "8 of 8 earn 2.8" in printed
    assert "pass rate: 0.000 on 3 problems x 3" in printed
    monkeypatch.undo()
    monkeypatch.setattr(preflight, "SECONDS", -1)
    assert "the pass rate is not measured: 3 completions of 12 tokens" in check(config, capsys)


@pytest.mark.parametrize(
    ("sampled", "of_the_run", "finding", "line"),
    [
        (30, 600, None, "time: sampling alone takes this CPU about 20 minutes"),  # 2 s each
        (30, 60_000, "sampling alone takes this CPU about 33 hours: fewer num_steps", None),
        (0, 60_000, "sampling alone takes this CPU more than 83 hours", None),  # 12 of them take over 60 s
        (30, 0, None, None),  # on a GPU
    ],
)
def test_the_check_says_how_long_a_cpu_samples(sampled, of_the_run, finding, line):
    """The original recipe on a laptop: nothing said that it takes days."""
    said = preflight.Report(grpo_train.Config(num_generations=12))
    preflight._check_sampling_time(said, sampled, 60.0, of_the_run)
    for found, told in ((said.findings, finding), (said.lines, line)):
        assert len(found) == (told is not None)
        assert told is None or told in found[0]


def test_the_pass_rate_is_that_of_all_problems_at_once(llama, tokenizer, prompts):
    decoder = GroupDecoder(llama, tokenizer)
    config = grpo_train.Config(num_generations=3, max_completion_length=8)
    problems = [SimpleNamespace(ids=ids) for ids in prompts]
    uniforms = rollout_uniforms(config.seed, 0, 0, 15, 8)
    rollout = decoder.rollout(prompts, Sampling(8, 3, 1.0), uniforms, interact=False)
    in_parts = preflight._sampled_until(float("inf"), decoder, problems, config)
    assert in_parts == decoder.completions(rollout)
    assert decoder.interrupted is None


def test_the_peak_is_that_of_a_trial_with_all_that_a_step_holds_at_full_length(
    llama, tokenizer, prompts, monkeypatch
):
    """Storage to the limit, moments, gradients, and the largest micro-batch of policy and reference."""
    small = small_update(tokenizer, prompts, beta=0.1, micro_batch_tokens=120, max_completion_length=40)
    learner, seen = small.learner, []
    decoder = GroupDecoder(llama, tokenizer, "e", Interaction(0.3))
    for file in ("fast_model", "engine", "decoder"):
        monkeypatch.setattr(f"decoding.{file}.CHUNK", 8)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: len(seen))
    forward, ref_forward = learner.scorer.forward, learner.reference_scorer.forward

    def watched(rollout, rows):
        assert len(decoder.engine.backbone.chunks) == 5, "storage to the limit"
        assert len(learner.optimizer.state) == len(list(small.policy.parameters())), "moments"
        gradients = all(p.grad is not None for p in small.policy.parameters())
        lengths = [len(rollout.prompts[n // 4]) + int(rollout.lengths[n]) for n in rows]
        seen.append((gradients, rollout.lengths.tolist(), sum(lengths), rollout.mix.shape))
        return forward(rollout, rows)

    monkeypatch.setattr(learner.scorer, "forward", watched)
    refs = []
    monkeypatch.setattr(
        learner.reference_scorer, "forward", lambda *given: refs.append(given) or ref_forward(*given)
    )
    before = small.weights()
    assert predicted_peak(small.config, learner, decoder, prompts, prompts * 3) == 2
    assert [gradients for gradients, *_ in seen] == [False, True], "the second finds the gradients"
    assert len(refs) == 2
    for _, lengths, tokens, mix in seen:
        assert lengths == [40] * 20
        assert 60 < tokens <= 120 + max(map(len, prompts))
        assert mix == (5, 40, 4, 4)
    assert small.has_weights(before)
    assert all(p.grad is None for p in small.policy.parameters())
    assert decoder.interrupted is None
    assert len(decoder.complete(prompts, Sampling(5))) == 5, "the decoder goes on"


def test_the_peak_of_several_processes_has_the_buckets_of_their_gradients(
    llama, tokenizer, prompts, fault_start, tmp_path, monkeypatch
):
    config = settings_of(fault_start, tmp_path / "out", beta=0.1)
    decoder = GroupDecoder(llama, tokenizer, "e", config.interaction)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 1000)
    start, seen = config.model, []

    def spied(config, learner, *given):
        seen.append(sum(p.numel() for p in learner.policy.parameters() if p.requires_grad))
        return predicted_peak(config, learner, *given)

    monkeypatch.setattr(preflight, "predicted_peak", spied)
    assert preflight._trial(start, decoder, prompts[:2], [], config, processes=1) == 1000
    assert preflight._trial(start, decoder, prompts[:2], [], config, processes=2) == 1000 + 4 * seen[1]
    assert seen[0] == seen[1] > 0


def test_the_check_counts_what_a_grader_does_not_decide(fault_start, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        "running.preflight.right_answers", lambda texts, *given: [None, *[True] * (len(texts) - 1)]
    )
    printed = check(settings_of(fault_start, tmp_path / "out"), capsys)
    assert re.search(r"gold answers: .* count as right, 1 undecided\n", printed)
    assert re.search(r"pass rate: 0\.9.* cut off, 1 undecided; ", printed)


def test_the_check_waits_for_a_warm_start(fault_start, tmp_path, capsys):
    settings = dict(warm_start="configs/tiny_warm_start.yaml", max_completion_length=60)  # it must fit in
    assert "a warm start comes first" in check(settings_of(fault_start, tmp_path / "out", **settings), capsys)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "No such file"),
        ("batch_size: 0", "batch_size=0: must be at least 1"),
        ("mu: 2", "no such setting"),
    ],
)
def test_a_bad_warm_start_is_refused_before_anything_and_named(fault_start, tmp_path, text, words):
    """--check said nothing of it, and the run named a `config` that was not given."""
    if text is not None:
        (tmp_path / "sft.yaml").write_text(text)
    with pytest.raises(SettingError, match=f"^warm_start=.*{words}"):
        settings_of(fault_start, tmp_path / "out", warm_start=str(tmp_path / "sft.yaml"))


def test_the_check_refuses_answers_that_no_reward_pays(fault_start, tmp_path, capsys):
    (tmp_path / "words.jsonl").write_text(
        json.dumps({"question": "Who?", "answer": "<answer> nobody </answer>"}) + "\n"
    )
    with pytest.raises(SettingError, match="no reference answer of this data is right in this format"):
        check(settings_of(fault_start, tmp_path / "out", dataset=str(tmp_path / "words.jsonl")), capsys)


def test_the_check_leaves_out_answers_for_which_all_rewards_abstain(fault_start, tmp_path, capsys):
    """`3 of 3 earn nan`, where the first answer earned nothing that is a number."""
    (tmp_path / "even.py").write_text(
        "def even(completions, answer, **kwargs):\n"
        "    pay = lambda a, c: None if int(a) % 4 else float(a in c[0]['content'])\n"
        "    return [pay(a, c) for a, c in zip(answer, completions)]\n"
    )
    (tmp_path / "three.jsonl").write_text(
        "".join(json.dumps({"question": f"Q{a}", "answer": str(a)}) + "\n" for a in (1, 4, 8))
    )
    given = dict(dataset=str(tmp_path / "three.jsonl"), reward=[f"{tmp_path}/even.py:even"])
    printed = check(settings_of(fault_start, tmp_path / "out", **given), capsys)
    assert "gold answers: 2 of 3 earn 1" in printed
    assert "train-0 ('Q1'): '1' earns nan" in printed


def test_the_check_reads_its_gold_through_the_tokenizer(fault_start, tokenizer, tmp_path, capsys):
    """It called its gold right, while every tag of the model's answers was lost on the way."""
    lossy = copy.deepcopy(tokenizer)
    lossy.backend_tokenizer.normalizer = normalizers.Replace("<answer>", "")
    shutil.copytree(fault_start / "model", tmp_path / "model")
    lossy.save_pretrained(tmp_path / "model")
    with pytest.raises(SettingError, match="no reference answer of this data is right in this format"):
        check(settings_of(fault_start, tmp_path / "out", model=str(tmp_path / "model")), capsys)


def test_the_check_pays_gold_and_near_misses_in_full_where_the_template_opens_the_answer(
    fault_start, tokenizer, tmp_path, capsys
):
    opening = copy.deepcopy(tokenizer)
    opening.chat_template += "{% if add_generation_prompt %}<reasoning>{% endif %}"
    shutil.copytree(fault_start / "model", tmp_path / "model")
    opening.save_pretrained(tmp_path / "model")
    printed = check(settings_of(fault_start, tmp_path / "out", model=str(tmp_path / "model")), capsys)
    assert "it opens the answer with '<reasoning>'" in printed
    assert "30 of 30 earn 2.8" in printed


def test_what_the_template_does_to_the_words_is_said_in_training_too(
    fault_start, tokenizer, tmp_path, capsys
):
    """`--check` alone said that the template left the system prompt out."""
    loud = copy.deepcopy(tokenizer)
    loud.chat_template = CHAT_TEMPLATE.replace("m['content']", "m['content'] | upper")
    shutil.copytree(fault_start / "model", tmp_path / "model")
    loud.save_pretrained(tmp_path / "model")
    shared = dict(model=str(tmp_path / "model"), dataset=str(fault_start), limit=3, num_steps=1)
    shared |= dict(batch_size=2, max_completion_length=100, cpu_threads=1)
    sft_train.train(sft_train.Config(**shared, num_epochs=None, output_dir=str(tmp_path / "sft")))
    shared |= dict(num_generations=2, beta=0.0, eval_every=0, output_dir=str(tmp_path / "grpo"))
    grpo_train.train(grpo_train.Config(**shared))
    said = capsys.readouterr().out
    assert said.count("note: the chat template changes the system prompt") == 2
    assert said.count("note: the chat template changes the message of the user") == 2


def test_the_check_says_that_a_raw_prompt_is_the_data_s(fault_start, tmp_path, capsys):
    """It said that the system prompt was in it."""
    rows = [{"prompt": f"{i} + 1 = ", "answer": str(i + 1)} for i in range(12)]
    (tmp_path / "raw.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = dict(dataset=str(tmp_path / "raw.jsonl"), prompt_format="raw")
    printed = check(settings_of(fault_start, tmp_path / "out", **settings), capsys)
    assert "prompt: it is the prompt of the data as it stands" in printed
