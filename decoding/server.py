"""Answers of an OpenAI-compatible server (vLLM, SGLang, llama.cpp, `transformers serve`), many at once."""

import http.client
import json
import queue
import random
import sys
import threading
import time
import urllib.request
from collections import deque
from dataclasses import dataclass, field

from tqdm import tqdm

from errors import RunError, SettingError, one_line

RETRIES = 6
RETRIED = (408, 409, 429, 500, 502, 503, 504)  # status codes of a busy server
FAILURES = (
    urllib.error.URLError,
    TimeoutError,
    ConnectionError,
    http.client.HTTPException,
    json.JSONDecodeError,
    UnicodeDecodeError,
)
LARGEST = 1 << 26  # bytes of an answer: more is no completion, and would fill the memory


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
    unsaid: object = field(default_factory=threading.Lock, compare=False)  # taken by the first that tells

    def ask(self, path, body=None):
        """The JSON that the server answers; a failure that may pass is retried after growing pauses."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        for attempt in range(RETRIES):
            try:
                request = urllib.request.Request(f"{self.url.rstrip('/')}/{path}", data, headers)
                code, answer = _fetched(request, self.timeout)
                if code < 300:
                    return json.loads(answer)
                reason = f"{code} {' '.join(answer.decode('utf-8', 'replace').split())[:200]}"
                if code not in RETRIED:
                    raise RunError(f"{self.url} refused the request: {reason}")
            except FAILURES as error:
                reason = f"{type(error).__name__}: {one_line(error)}"
            if attempt + 1 < RETRIES:
                self._say_once(f"did not answer ({reason}): each request is made up to {RETRIES} times")
                time.sleep(min(30.0, 0.5 * 2**attempt) * (0.5 + random.random()))
        raise RunError(f"{self.url} did not answer in {RETRIES} attempts ({reason})")

    def _say_once(self, line):
        """A slow server's attempts take minutes, in which nothing else would be seen."""
        if self.unsaid.acquire(blocking=False):
            tqdm.write(f"note: {self.url} {line}", file=sys.stderr)

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


def _fetched(request, seconds):
    """The status and the body of an answer, which must be whole after about so many seconds.

    The time limit of urlopen is of a single read: a byte now and then would keep it waiting for ever.
    """
    end = time.monotonic() + seconds
    try:
        response = urllib.request.urlopen(request, timeout=seconds)
    except urllib.error.HTTPError as error:  # a status from 300 on, which may have a body, too
        response = error
    body = bytearray()
    with response:
        while part := response.read1(1 << 16):
            body += part
            if time.monotonic() > end:
                raise TimeoutError(f"no whole answer within {seconds:g} s")
            if len(body) > LARGEST:
                raise RunError(f"{request.full_url} sends more than {LARGEST >> 20} MB for one answer")
        return response.code, bytes(body)


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
    An error or Ctrl-C does not wait for the requests in flight.
    """
    G = sampling.num_generations
    indices = range(len(chats)) if indices is None else indices
    answers = [[None] * G for _ in chats]
    left, ended = deque(range(len(chats) * G)), queue.SimpleQueue()

    def work():
        while True:
            try:
                i, j = divmod(left.popleft(), G)
            except IndexError:
                return
            try:
                answer = server.complete(chats[i], sampling, seed + indices[i] * G + j)
            except BaseException as error:  # raised where the answers are waited for
                left.clear()  # at once: this thread would ask for the next before that is done
                answer = error
            ended.put((i, j, answer))

    # daemons, and no ThreadPoolExecutor: Python's end waits until its threads have their answers
    for _ in range(min(at_once, len(left))):
        threading.Thread(target=work, daemon=True).start()
    try:
        for _ in range(len(chats) * G):
            i, j, answer = ended.get()
            if isinstance(answer, BaseException):
                raise answer
            answers[i][j] = answer
            if keep is not None and None not in answers[i]:
                keep(indices[i], answers[i])
    finally:
        left.clear()
    return answers
