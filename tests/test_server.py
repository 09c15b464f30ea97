"""Evaluating a server: a real `transformers serve` where it is installed, and one that behaves badly."""

import contextlib
import importlib.util
import json
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

import grpo_eval
from decoding.server import connect
from errors import RunError, SettingError
from running.folder import save_model
from small_models import build_model


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "test.jsonl").write_text(
        "".join(
            json.dumps({"question": f"What is {i} and 1?", "answer": str(i + 1)}) + "\n" for i in range(6)
        )
    )
    return folder


class Moody(BaseHTTPRequestHandler):
    """Right in the end, but busy first, cut off, or never there: what the server's `mood` says."""

    def log_message(self, *args):
        pass

    def reply(self, code, body):
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def drip(self):
        """A blank now and then, as some gateways send to keep a connection alive."""
        self.send_response(200)
        self.end_headers()
        with contextlib.suppress(OSError):  # the other side has had enough
            for _ in range(100):
                self.wfile.write(b" ")
                self.server.hears.wait(0.01)

    def do_GET(self):
        self.reply(200, {"data": [{"id": name} for name in self.server.models]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.headers.get("Authorization"), body))
        count = len(self.server.seen)
        if self.server.mood == "refuses" or (
            self.server.dies_after is not None and count > self.server.dies_after
        ):
            return self.reply(401, {"error": "no key"})
        if self.server.mood == "deaf":  # but for the first request
            if count == 1:
                return self.reply(401, {"error": "no key"})
            self.server.hears.wait(5.0)
            self.server.heard += 1
        if self.server.mood == "drips":
            return self.drip()
        if self.server.mood == "odd":
            return self.reply(200, {"surprise": 1})
        if self.server.mood == "busy" and count % 2:
            return self.reply(429, {"error": "later"})
        if self.server.mood == "slow" and count == 1:
            time.sleep(1.0)
        is_text = self.path.endswith("/v1/completions")
        asked = body["prompt"] if is_text else body["messages"][-1]["content"]
        number = int(asked.partition("What")[2].split()[1]) + 1
        text = f"<reasoning>\nx\n</reasoning>\n<answer>\n{number}\n</answer>"
        choice = {"text": text} if is_text else {"message": {"content": text}}
        return self.reply(
            200,
            {
                "choices": [{**choice, "finish_reason": "stop"}],
                "usage": {"completion_tokens": 9},
            },
        )


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds, sleep=time.sleep: sleep(min(seconds, 0.01)))
    made = ThreadingHTTPServer(("127.0.0.1", 0), Moody)
    made.mood, made.models, made.seen = "good", ["only"], []
    made.dies_after, made.hears, made.heard = None, threading.Event(), 0
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield made
    made.hears.set()
    made.shutdown()


def settings_of(server, data, tmp_path, **more):
    address = dict(model="none", api=f"http://127.0.0.1:{server.server_port}/v1")
    folders = dict(dataset=str(data), output_dir=str(tmp_path / "runs"))
    return grpo_eval.Config(**{**address, **folders, "api_timeout": 5.0, "api_at_once": 3, **more})


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("mood", ["good", "busy", "slow"])
def test_answers_are_graded_as_a_model_s_own_are_however_the_server_feels(
    mood, server, data, tmp_path, monkeypatch
):
    server.mood = mood
    monkeypatch.setenv("OPENAI_API_KEY", "secret-key")
    report, folder = grpo_eval.evaluate(
        settings_of(server, data, tmp_path, api_timeout=0.5 if mood == "slow" else 5.0)
    )
    assert (report["questions"], report["accuracy"], report["model"], report["truncated"]) == (
        6,
        1.0,
        "only",
        0.0,
    )
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert [r["target"] for r in rows] == [str(i + 1) for i in range(6)], "in order"
    key, body = server.seen[0]
    assert key == "Bearer secret-key"
    assert body["messages"][0]["role"] == "system"
    assert not any(b"secret-key" in path.read_bytes() for path in folder.iterdir()), (
        "a key is not written down"
    )


@pytest.mark.usefixtures("undrawn")
def test_a_server_gets_raw_prompts_as_text_and_the_settings_of_its_template(server, data, tmp_path):
    """It got a chat whatever the model was trained on, and no enable_thinking."""
    raw = settings_of(server, data, tmp_path, prompt_format="raw", system_prompt="</reasoning> {question}")
    report, _ = grpo_eval.evaluate(raw)
    prompts = sorted(body["prompt"] for _, body in server.seen)
    assert (report["accuracy"], prompts[0]) == (1.0, "</reasoning> What is 0 and 1?")
    server.seen.clear()
    kwargs = '{"enable_thinking": false}'
    grpo_eval.evaluate(settings_of(server, data, tmp_path, chat_template_kwargs=kwargs, name="chat"))
    assert all(body["chat_template_kwargs"] == {"enable_thinking": False} for _, body in server.seen)


def test_a_server_that_refuses_or_answers_nonsense_is_an_error_in_one_line(server, data, tmp_path):
    server.mood = "refuses"
    with pytest.raises(RunError, match=r"refused the request: 401 .*no key"):
        grpo_eval.evaluate(settings_of(server, data, tmp_path))
    server.mood = "odd"
    with pytest.raises(RunError, match="something else than a completion"):
        grpo_eval.evaluate(settings_of(server, data, tmp_path))
    server.models = ["a", "b"]
    with pytest.raises(SettingError, match="the server has 2 models: name one of a, b"):
        grpo_eval.evaluate(settings_of(server, data, tmp_path))


def test_a_request_takes_no_longer_than_its_limit_however_often_a_byte_comes(server, data, tmp_path, capsys):
    """The limit was of a single read: a byte a second kept an evaluation waiting for ever, without a word."""
    server.mood = "drips"
    with pytest.raises(RunError, match=r"6 attempts \(TimeoutError: no whole answer within 0.1 s\)"):
        grpo_eval.evaluate(settings_of(server, data, tmp_path, api_timeout=0.1))
    assert capsys.readouterr().err.count("did not answer (TimeoutError") == 1


def test_an_evaluation_that_ends_does_not_wait_for_requests_in_flight(server, data, tmp_path):
    """Ctrl-C and SIGTERM waited for each of them, of a server that is silent for half an hour."""
    server.mood = "deaf"
    with pytest.raises(RunError, match="refused the request"):
        grpo_eval.evaluate(settings_of(server, data, tmp_path))
    assert server.heard == 0


def test_an_answer_without_end_is_cut_off(server, data, tmp_path, monkeypatch):
    monkeypatch.setattr("decoding.server.LARGEST", 20)
    with pytest.raises(RunError, match="for one answer"):
        grpo_eval.evaluate(settings_of(server, data, tmp_path))


@pytest.mark.usefixtures("undrawn")
def test_an_evaluation_of_a_server_that_went_away_asks_the_rest_only(server, data, tmp_path):
    common = dict(num_samples=2, temperature=1.0, api_at_once=1)
    whole, folder = grpo_eval.evaluate(settings_of(server, data, tmp_path, name="whole", **common))
    first, server.seen[:], server.dies_after = [body for _, body in server.seen], [], 5
    with pytest.raises(RunError, match="refused the request"):
        grpo_eval.evaluate(settings_of(server, data, tmp_path, name="cut", **common))
    server.dies_after = None
    server.models = ["other"]
    with pytest.raises(SettingError, match=r"\(answerer 'only' there, 'other' here\)"):
        grpo_eval.evaluate(settings_of(server, data, tmp_path, name="cut", **common))
    server.models = ["only"]
    report, again = grpo_eval.evaluate(settings_of(server, data, tmp_path, name="cut", **common))
    assert {**report, "seconds": 0} == {**whole, "seconds": 0}
    assert (again / "samples.jsonl").read_text() == (folder / "samples.jsonl").read_text()
    asked = Counter(json.dumps(body) for _, body in server.seen)
    assert set(asked) == {json.dumps(body) for body in first}, "with the same seeds"
    assert sum(asked.values()) <= 12 + 3, (
        "again only what was refused (the next may be on its way already) and the other half of its question"
    )


def test_a_server_that_is_not_there_is_an_error_in_one_line(data, tmp_path, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = grpo_eval.Config(
        model="none",
        api=f"http://127.0.0.1:{port}/v1",
        api_model="x",
        dataset=str(data),
        output_dir=str(tmp_path),
    )
    with pytest.raises(RunError, match="did not answer in 6 attempts"):
        grpo_eval.evaluate(config)
    with pytest.raises(SettingError, match="must be an address"):
        connect("localhost:8000", "x")


@pytest.mark.slow
@pytest.mark.skipif(
    any(importlib.util.find_spec(p) is None for p in ("fastapi", "uvicorn", "openai")),
    reason="needs transformers[serving]",
)
def test_a_real_transformers_server_gives_what_the_model_gives_here(tokenizer, data, tmp_path):
    save_model(build_model("llama", tokenizer), tokenizer, tmp_path / "model", torch.float32)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = shutil.which("transformers", path=str(sys.executable).rpartition("/")[0]) or "transformers"
    words = f"serve --host 127.0.0.1 --port {port}".split()
    process = subprocess.Popen([script, *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        end = time.monotonic() + 90
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=2)
                break
            except OSError:
                assert process.poll() is None, process.stderr.read()[-2000:]
                assert time.monotonic() < end
                time.sleep(0.5)
        common = dict(dataset=str(data), output_dir=str(tmp_path / "runs"), max_completion_length=12)
        url = f"http://127.0.0.1:{port}/v1"
        _, theirs = grpo_eval.evaluate(
            grpo_eval.Config(
                model="x", api=url, api_model=str(tmp_path / "model"), api_at_once=2, name="theirs", **common
            )
        )
    finally:
        process.kill()
    _, ours = grpo_eval.evaluate(grpo_eval.Config(model=str(tmp_path / "model"), name="ours", **common))
    texts = [
        [json.loads(line)["resps"][0].strip() for line in (folder / "samples.jsonl").read_text().splitlines()]
        for folder in (ours, theirs)
    ]
    assert texts[0] == texts[1]
