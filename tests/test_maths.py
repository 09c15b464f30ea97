"""Whether two MATH answers are the same object: by hand, on hazards, from threads, and on MATH-500."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from answers import judge
from answers.judge import all_math_equal, math_equal
from small_growth import growth

ROOT = Path(__file__).parents[1]
MATH500 = ROOT.parent / "shared" / "data" / "math500" / "test.jsonl"

SAME = [
    (r"\frac34", r"\frac{3}{4}"), (r"\dfrac{3}{4}", "3/4"), (r"\tfrac 34", "0.75"),
    (r"\frac{7}9", r"\frac{7}{9}"), (r"\left(1,2\right)", "(1, 2)"), ("x=7", "7"), ("7", "y = 7"),
    (r"x \in (0,3]", "(0,3]"), ("12 dollars", "12"), (r"12\text{ cm}", "12"), (r"12 \mbox{ inches}^2", "12"),
    (r"45^\circ", "45"), ("45°", "45"), (r"60\%", "60"), ("60%", "60"), (r"\$7.50", "7.5"),
    (r"12,\!345", "12345"), (r"1,\! 234,\! 567", "1234567"), (r"3\frac{1}{4}", "13/4"), ("3 1/4", "3.25"),
    (r"-2\frac12", "-2.5"), (r"\frac{2}{\sqrt{6}}", r"\frac{\sqrt{6}}{3}"), (r"2\sqrt3", r"\sqrt{12}"),
    ("sqrt(12)", r"2\sqrt{3}"), ("3*pi + 1", r"1+3\pi"), (r"(t+1)(t-1)", "t^2-1"), ("t**2", "t^2"),
    ("4 - 3i", "-3i+4"), (r"e^{i\pi}", "-1"), ("i^2", "-1"), ("2, 9", "9,2"), (r"\{9, 2\}", "2,9"),
    ("2 and 9", "9, 2"), ("x=2 or x=9", "2,9"), (r"\{6\}", "6"), (r"4 \pm \sqrt{7}", r"4+\sqrt7, 4-\sqrt7"),
    (r"\pm 8", "8,-8"), (r"(5,\infty)\cup(-\infty,1)", r"(-\infty,1) \cup (5,\infty)"),
    (r"\emptyset", r"\varnothing"), ("y = 3x - 1", "y=-1+3x"), ("3x - y = 1", "y = 3x - 1"),
    ("6x - 2y - 2 = 0", "y=3x-1"), ("t > 4", "4 < t"), ("t>4", r"(4,\infty)"), (r"-1 \le t < 2", "[-1,2)"),
    ("2 > t >= -1", "[-1,2)"), ("x + y < 3", "2x+2y < 6"), (r"x \ne 2", r"x\neq 2"),
    (r"\text{North}", "north"), (r"\text{(D)}", "D"), ("(d)", r"\text{D}"), ("713_8", "713_{8}"),
    ("459", "713_8"),
    (r"\begin{pmatrix} 1/2 \\ -3 \end{pmatrix}", r"\begin{bmatrix} 0.5 \\ -3 \end{bmatrix}"), ("½", "0.5"),
    ("2³", "8"), ("−4", "-4"), ("５", "5"), ("3e4", "30000"), (r"6.5\times 10^{3}", "6500"),
    (r"0.\overline{6}", "2/3"), (r"\log_3 81", "4"), (r"\sqrt[3]{27}", "3"), ("6!", "720"),
    (r"\binom{6}{2}", "15"), (r"\boxed{11}", "11"), ("$11$", "11"), (r"\(11\)", "11"), ("11.", "11"),
    (r"\sin^2 u+\cos^2 u", "1"), (r"\infty", "infinity"), ("no solution", "No solution."),
    (r"\frac{-2}{3}", r"-\frac23"), (r"\frac\pi4", r"\frac{\pi}{4}"), (r"\frac1\pi", r"1/\pi"),
    (r"\frac x2", "0.5x"), (r"\frac a{b+c}", r"\frac{a}{b+c}"), (r"\binom52", "10"), (r"\dbinom{6}{2}", "15"),
    (r"x\geqslant 5", r"x\ge5"), (r"(1,+\infty)", r"(1,\infty)"), (r"1\,000", "1000"), ("√(3)", r"\sqrt3"),
    (r"\text{Yes}", "yes"), (r"\theta=30", "30"), (r"AB = \sqrt2", r"\sqrt2"), ("(x,y)=(1,2)", "(1,2)"),
    (r"m\angle A = 40^\circ", "40"), (r"P(A) = \frac13", "1/3"), ("x=1, y=2", "y = 2, x = 1"),
    ("x_1=1, x_2=2", "1,2"), (r"x = \frac{1\pm\sqrt5}{2}", r"\frac{1-\sqrt5}{2}, \frac{1+\sqrt5}{2}"),
    (r"\frac{\pm1}{2}", "0.5,-0.5"), ("10^{60}+1", "1+10^{60}"), ("Yes", "yes"), ("ab", "ba"),
    (r"5\text{ million}", "5 million"), (r"10^{-50}", r"\frac{1}{10^{50}}"), (r"\tan 60^\circ", r"\sqrt{3}"),
    (r"\cos{60°}", r"\frac12"), (r"\sin^2(30^\circ)", "0.25"), (r"\frac{1}{\sin 30^\circ}", "2"),
    ("2(3)", "6"), ("(2)(3)", "6"), (r"\binom{5}{2}(3)", "30"), ("3(4)/2", "6"), ("4^2(2)", "32"),
    (r"\log_2(8)", "3"), (r"{5 \choose 2}", "10"), ("10^-3", "0.001"), ("x^10", "x^{10}"),
    ("2.5 x 10^3", "2500"), ("2.5×10⁻³", "0.0025"), ("x¹²", "x^{12}"), ("√53", r"\sqrt{53}"),
    ("2√21/5", r"\frac{2\sqrt{21}}{5}"), (r"{\frac{3}{4}}", "3/4"), (r"10{,}000\pi", r"10000\pi"),
    (r"6-5\mathrm{i}", "6-5i"), (r"\frac{20000}{\pi} \approx 6366.2", r"\frac{20000}{\pi}"),
    (r"A = \begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    (r"\mathbf{v} = \begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    (r"\left[\begin{array}{cc}1&0\\0&1\end{array}\right]", r"\begin{pmatrix}1&0\\0&1\end{pmatrix}"),
    (r"\begin{pmatrix}\frac12\\[2pt]3\end{pmatrix}", r"\begin{pmatrix}0.5\\3\end{pmatrix}"),
    (r"(r,\theta)=(3,\frac{\pi}{2})", r"(3,\frac\pi2)"), ("(-∞,2) U (2,∞)", r"(-\infty,2)\cup(2,\infty)"),
    (r"\mathbb{R}", r"(-\infty,\infty)"), (r"\text{all real numbers}", r"\mathbb{R}"),
    ("an ellipse", r"\text{ellipse}"), (r"\text{A, C}", "C, A"), (r"\mathbf{(E)}", r"\text{(E)}"),
    ("204 base 5", "204_5"), ("(204)_5", "204_{5}"), (r"2k\text{ cm}", "2k"), ("p-q", "p - q"),
]  # fmt: skip
OTHER = [
    ("(1,2)", "(2,1)"), ("[1,2]", "(1,2)"), ("(1,2]", "[1,2)"), (r"\{1,2\}", "(1,2)"), ("1,2,3", "(1,2,3)"),
    ("1", "1,2"), ("1,1,2", "1,2"), ("41=42", "42"), ("1=2=3", "3"), ("0.33", r"\frac13"),
    ("3.14159265358979", r"\pi"), ("22/7", r"\pi"), ("1.41421356237", r"\sqrt2"), ("713", "713_8"),
    ("5", r"5\sqrt{2}"), ("10%", "0.1"), ("3 4", "34"), ("3 4", "12"), ("2 1/2", "21/2"), ("x", "y"),
    ("A", "a"), ("x^2", "x^3"), ("t > 4", "t < 4"), ("t > 4", "t \\ge 4"), ("x+y<3", "x+y>3"),
    ("-x-y<3", "x+y<3"), ("y=x", "y=-x"), ("x", "1"), ("|x|", "x"), (r"\text{Monday}", r"\text{Tuesday}"),
    ("", ""), ("7", ""), ("", "7"), ("5/0", "5"), ("100000000000000000001", "100000000000000000000"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}"), ("2x+3", "y=2x+3"),
    (r"10^{-50}", r"2\cdot 10^{-50}"), ("(1,234)", "1234"), ("a_{12}", "10"), ("F_{20}", "15"),
    (r"10^{-50}", "0"), ("10^{60}", "10^{60}+1"), (r"10^{60}+\sqrt2", r"10^{60}+1+\sqrt2"),
    ("9^{9^9}", "9^{9^9}+1"), ("x=1,y=2", "x=2,y=1"), ("x=1,y=2", "x=1,z=2"), (r"\text{Yes}", "no"),
    (r"\frac{1\pm\sqrt5}{2}", r"\frac{1+\sqrt5}{2}"), ("(x,y)=(1,2)", "(2,1)"), (r"\binom52", "5"),
    (r"1\,00", "100"), ("5 million", "5"), (r"5\text{ million}", "5"), ("5 dozen", "5"),
    (r"5\text{ thousand}", "5"), (r"4\text{ squared}", "4"),
    *((text, r"\frac{3}{4}") for text in (
        r"\frac14 \to \frac34", r"\frac14 \implies \frac34", r"\frac14 | \frac34", r"\frac14 \\ \frac34",
        r"\frac14 \boxed{\frac34}", r"\frac34 \text{ or \frac14}", r"\frac34 \text{ not } \frac14",
        r"\frac34 \approx \frac14", r"A. \frac14 B. \frac34", r"\text{\frac14 or} \frac34",
    )),
    (r"42\text{ or 41}", "42"), (r"42 \text{41}", "42"), (r"41 \boxed{42}", "42"), (r"-\boxed{42}", "42"),
    ("6:1", "6"), ("x'", "x"), (r"42 \ldots", "42"), (r"36\text{ dollars and 50 cents}", "36"),
    (r"12\pi \text{ million}", r"12\pi"), (r"12\pi\text{ plus one}", r"12\pi"), ("x+1 or x+2", "x+1"),
    (r"\text{A}\text{B}", "A"), (r"\text{(B)} \text{(C)}", "B"), (r"\text{Evelyn}\text{ or Carla}", "Evelyn"),
    (r"\text{A, C}", "A"), ("3R^2", "3r^2"), ("aA^2", "a^2A"), (r"\Delta+1", r"\delta+1"), ("9_5", "9"),
    ("12_5+1", "13"), ("2(3)", "5"), (r"\binom{5}{2}(3)", "13"), ("2{3}", "5"), (r"\tan 45", "1"),
    (r"\sin 30", r"\sin 30^\circ"), ("5 or more", "5"), (r"5\text{ or more}", "5"), ("more than 5", "5"),
    (r"\text{all real numbers except 2}", r"\mathbb{R}"), (r"\sqrt2 \approx 1.41", "1.41"), ("q-p", "p - q"),
]  # fmt: skip


@pytest.mark.parametrize(("left", "right"), SAME)
def test_two_spellings_of_one_object(left, right):
    assert math_equal(left, right)
    assert math_equal(right, left)


@pytest.mark.parametrize(("left", "right"), OTHER)
def test_two_objects(left, right):
    assert not math_equal(left, right)
    assert not math_equal(right, left)


HAZARDS = [
    "9^{9^9}", r"\frac{1}{3^{9^9}}+x", "10000000!", "(" * 900 + "x" + ")" * 900, r"\frac{" * 300,
    r"\boxed{" * 300, "x^{" * 300 + "2" + "}" * 300, "1+" * 900 + "1", r"\pm" * 200, "{" * 1500,
    "\0", "\ud800", "__import__('os').system('touch PWNED')",
]  # fmt: skip


@pytest.fixture
def questions(monkeypatch):
    """The seconds that children are given, one number for each question that is put to one."""
    given = []
    put = judge._Child._ask

    def note_and_put(child, timeout, question):
        given.append(timeout)
        return put(child, timeout, question)

    monkeypatch.setattr(judge._Child, "_ask", note_and_put)
    return given


@pytest.mark.slow
def test_what_would_take_for_ever_is_not_equal_and_its_child_is_given_its_time_once(
    tmp_path, monkeypatch, questions
):
    monkeypatch.chdir(tmp_path)
    for text in HAZARDS:
        questions.clear()
        assert math_equal(text, "42+x", timeout=0.2) is False
        assert sum(questions) <= 0.2, text[:20]
    assert math_equal("x+42", "42+x"), "the pool still answers"
    assert not list(tmp_path.iterdir())


def test_a_big_power_is_left_alone(monkeypatch):
    """On a clock that only the child's time moves: on a busy machine the time to ask was less than 0.2 s."""
    clock, questions = [0.0], []

    def take_the_whole_time(child, timeout, question):
        questions.append(timeout)
        clock[0] += timeout

    monkeypatch.setattr(judge, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(judge._Child, "_ask", take_the_whole_time)
    assert not math_equal("9^{9^9}", "42+x", timeout=0.2)
    assert questions == [0.2]


PIECES = [
    "\\a", "\\frac1\\approx ", "{a\\choose ", "√1", "5 base ", "5_", "1,000,", "\\sin 3", "\\text{a}", "¹",
    "or more ", "\\pi", "\\alpha{1}", "1.1",
]  # fmt: skip


@pytest.mark.parametrize("piece", PIECES)
def test_our_own_rules_take_at_most_quadratic_time(piece, monkeypatch):
    """A pattern with two stars before its end took minutes on a thousand commands, and nothing ended it.

    Eleven times \\alpha{1} and a semicolon took 22 seconds, for a command was also read as its letters.
    """
    monkeypatch.setattr(judge, "_asked", lambda *question: False)
    for template in ("{}", "5{}", "x={}y", "{}+;"):
        short, long = (template.format(piece * (size // len(piece))) for size in (497, 1988))
        assert not math_equal(long, "x+42")
        assert growth(lambda text: math_equal(text, "x+42"), short, long, limit=32) < 32


@pytest.mark.slow
def test_many_pairs_are_bounded_together(questions):
    """In all each child has time for four questions, and one more may have begun."""
    answers = [f"9^{{9^9}}+{i}" for i in range(40)] + ["x+1"]
    equal = all_math_equal(answers, ["x+7"] * 40 + ["1+x"], timeout=0.2, in_all=0.8)
    assert 1 <= len(questions) <= 5 * judge._children().size < 40
    assert not any(equal[:40])


def test_from_threads_at_once():
    equal = [None] * 12

    def ask(i):
        equal[i] = math_equal(f"(u+{i})^2", f"u^2+{2 * i}u+{i * i}")

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert all(equal)


def test_a_child_that_dies_is_replaced():
    assert math_equal("v+1", "1+v")
    for child in list(judge._children().idle.queue):
        if child.process is not None:
            os.kill(child.process.pid, signal.SIGKILL)
    assert math_equal("v+2", "2+v")


ASK = "from answers import judge; assert judge.math_equal('w+1', '1+w')\n"
SHOW = "print([child.process.pid for child in judge._children().idle.queue if child.process], flush=True)\n"


def start(program, folder):
    """A python in a folder with other `answers`, which must not be taken for the project's."""
    (folder / "answers.py").write_text("raise SystemExit('the wrong answers')")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-c", program]
    return subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, text=True)


def ends(pid):
    """Whether a process ends, or waits for its parent to notice, within some seconds."""
    for _ in range(100):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.slow
def test_no_child_outlives_its_parent(tmp_path):
    parent = start(ASK + SHOW, tmp_path)
    pids = json.loads(parent.communicate()[0])
    assert parent.returncode == 0
    assert pids
    assert all(map(ends, pids)), "a child is still there"


@pytest.mark.slow
def test_a_child_that_is_busy_when_its_parent_is_killed_ends_at_its_time(tmp_path):
    parent = start(ASK + SHOW + "judge.math_equal('9^{9^9}', '42+x', timeout=1.0)", tmp_path)
    (pid,) = json.loads(parent.stdout.readline())
    time.sleep(0.5)
    parent.kill()
    parent.communicate()
    ended = ends(pid)
    if not ended:
        os.kill(pid, signal.SIGKILL)
    assert ended, "the child goes on without its parent"


@pytest.mark.skipif(not MATH500.exists(), reason="MATH-500 is not beside this checkout")
def test_math500_against_itself_and_against_its_neighbours():
    gold = [json.loads(line)["answer"] for line in MATH500.read_text().splitlines()]
    assert all(all_math_equal([f" {answer}." for answer in gold], gold))
    following = gold[1:] + gold[:1]
    verdicts = all_math_equal(gold, following)
    equal = {(one, two) for one, two, verdict in zip(gold, following, verdicts, strict=True) if verdict}
    assert equal == {("5", "x=5"), ("7", "7"), ("3", "3")}
