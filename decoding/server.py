"""Answers of an OpenAI-compatible server (vLLM, SGLang, llama.cpp, `transformers serve`), many at once."""

import http.client
import json
import random
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from errors import RunError, SettingError, one_line

RETRIES = 6
RETRIED = (408, 409, 429, 500, 502, 503, 504)  # status codes of a busy server
FAILURES = (
    urllib.error.URLError,
    TimeoutError,
    ConnectionError,
    http.client.HTTPException,
    json.JSONDecodeError,
)


@dataclass(frozen=True)
class Server:
    """`url` is the base, such as http://localhost:8000/v1.

    The key comes from OPENAI_API_KEY, never from a setting, since settings are written down.
    """

    url: str
    model: str
    key: str = ""
    timeout: float = 300.0
    template_kwargs: dict = field(default_factory=dict)  # for the server's chat template

    def ask(self, path, body=None):
        """The JSON that the server answers; a failure that may pass is retried after growing pauses."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        for attempt in range(RETRIES):
            try:
                request = urllib.request.Request(f"{self.url.rstrip('/')}/{path}", data, headers)
                with urllib.request.urlopen(request, timeout=self.timeout) as response:
                    return json.load(response)
            except urllib.error.HTTPError as error:
                words = " ".join(error.read().decode("utf-8", "replace").split())[:200]
                if error.code not in RETRIED:
                    raise RunError(f"{self.url} refused the request: {error.code} {words}") from error
                reason = f"{error.code} {words}"
            except FAILURES as error:
                reason = f"{type(error).__name__}: {one_line(error)}"
            if attempt + 1 < RETRIES:
                time.sleep(min(30.0, 0.5 * 2**attempt) * (0.5 + random.random()))
        raise RunError(f"{self.url} did not answer in {RETRIES} attempts ({reason})")

    def complete(self, prompt, sampling, seed):
        """One completion of a chat, or of a prompt as text: text, tokens, and whether it ended by itself.

        top_k is not sent.
        """
        is_text = isinstance(prompt, str)
        body = dict(
            model=self.model,
            **({"prompt": prompt} if is_text else {"messages": prompt}),
            max_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            seed=seed,
        )
        if sampling.top_p < 1:
            body["top_p"] = sampling.top_p
        if self.template_kwargs and not is_text:
            body["chat_template_kwargs"] = self.template_kwargs
        answer = self.ask("completions" if is_text else "chat/completions", body)
        try:
            choice = answer["choices"][0]
            text = choice["text"] if is_text else choice["message"].get("content")
            text, reason = text or "", choice.get("finish_reason")
        except (KeyError, IndexError, TypeError) as error:
            shown = json.dumps(answer)[:200]
            raise RunError(f"{self.url} answered something else than a completion: {shown}") from error
        tokens = int((answer.get("usage") or {}).get("completion_tokens") or 0)
        return text, tokens, reason != "length"


def connect(url, model, key="", timeout=300.0, template_kwargs=None):
    """A Server; where no model is named, with the only one that it has."""
    if not url.startswith(("http://", "https://")):
        raise SettingError("api", url, "must be an address such as http://localhost:8000/v1")
    kwargs = template_kwargs or {}
    if model:
        return Server(url, model, key, timeout, kwargs)
    names = [entry["id"] for entry in Server(url, "", key, timeout).ask("models").get("data", [])]
    if len(names) != 1:
        remedy = f"the server has {len(names)} models: name one of {', '.join(names[:10])}"
        raise SettingError("api_model", None, remedy)
    return Server(url, names[0], key, timeout, kwargs)


def complete(server, chats, sampling, seed, at_once=32, indices=None, keep=None):
    """For each chat (messages, or a prompt as text) G triples (text, tokens, whether it ended), in order.

    `at_once` requests are in flight. `indices` and `keep(index, triples)` as for the decoder's `complete`.
    """
    G, lock = sampling.num_generations, threading.Lock()
    indices = range(len(chats)) if indices is None else indices
    answers = [[None] * G for _ in chats]

    def ask(job):
        i, j = divmod(job, G)
        answer = server.complete(chats[i], sampling, seed + indices[i] * G + j)
        with lock:
            answers[i][j] = answer
            if keep is not None and None not in answers[i]:
                keep(indices[i], answers[i])

    with ThreadPoolExecutor(at_once) as threads:
        list(threads.map(ask, range(len(chats) * G)))
    return answers
