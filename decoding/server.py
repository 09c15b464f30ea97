"""Answers of any OpenAI-compatible server (vLLM, SGLang, llama.cpp, `transformers serve`), asked side by side."""

import http.client
import json
import random
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from errors import RunError, SettingError

RETRIES = 6


AGAIN = (408, 409, 429, 500, 502, 503, 504)  # what a busy server says


@dataclass(frozen=True)
class Server:
    """`url` is the base, such as http://localhost:8000/v1; the key comes from OPENAI_API_KEY, never from a setting that is written down."""

    url: str
    model: str
    key: str = ""
    timeout: float = 300.0

    def ask(self, path, body=None):
        """The JSON that the server answers; retries what may pass, with growing pauses."""
        data = None if body is None else json.dumps(body).encode()
        headers = {
            "Content-Type": "application/json",
            **({"Authorization": f"Bearer {self.key}"} if self.key else {}),
        }
        for attempt in range(RETRIES):
            try:
                request = urllib.request.Request(f"{self.url.rstrip('/')}/{path}", data, headers)
                with urllib.request.urlopen(request, timeout=self.timeout) as response:
                    return json.load(response)
            except urllib.error.HTTPError as error:
                words = " ".join(error.read().decode("utf-8", "replace").split())[:200]
                if error.code not in AGAIN:
                    raise RunError(f"{self.url} refused the request: {error.code} {words}") from error
                reason = f"{error.code} {words}"
            except (
                urllib.error.URLError,
                TimeoutError,
                ConnectionError,
                http.client.HTTPException,
                json.JSONDecodeError,
            ) as error:
                reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            if attempt + 1 < RETRIES:
                time.sleep(min(30.0, 0.5 * 2**attempt) * (0.5 + random.random()))
        raise RunError(f"{self.url} did not answer in {RETRIES} attempts ({reason})")


def connect(url, model, key="", timeout=300.0):
    """A server that answers; where no model is named, the only one that it has."""
    if not url.startswith(("http://", "https://")):
        raise SettingError("api", url, "must be an address such as http://localhost:8000/v1")
    if model:
        return Server(url, model, key, timeout)
    names = [entry["id"] for entry in Server(url, "", key, timeout).ask("models").get("data", [])]
    if len(names) != 1:
        raise SettingError(
            "api_model", None, f"the server has {len(names)} models: name one of {', '.join(names[:10])}"
        )
    return Server(url, names[0], key, timeout)


def complete(
    server, chats, samples, max_tokens, temperature, top_p, seed, at_once=32, places=None, keep=None
):
    """For each chat (a list of messages) `samples` triples (text, tokens, whether it ended by itself), in order.

    `places` and `keep(place, triples)` as for the decoder's `complete`.
    """
    places, lock, found = (
        range(len(chats)) if places is None else places,
        threading.Lock(),
        [[None] * samples for _ in chats],
    )

    def one(job):
        i, j = job
        body = dict(
            model=server.model,
            messages=chats[i],
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed + places[i] * samples + j,
        )
        if top_p < 1:
            body["top_p"] = top_p
        answer = server.ask("chat/completions", body)
        try:
            choice = answer["choices"][0]
            text, reason = choice["message"].get("content") or "", choice.get("finish_reason")
        except (KeyError, IndexError, TypeError) as error:
            raise RunError(
                f"{server.url} answered something else than a completion: {json.dumps(answer)[:200]}"
            ) from error
        with lock:
            found[i][j] = (
                text,
                int((answer.get("usage") or {}).get("completion_tokens") or 0),
                reason != "length",
            )
            if keep is not None and None not in found[i]:
                keep(places[i], found[i])

    jobs = [(i, j) for i in range(len(chats)) for j in range(samples)]
    with ThreadPoolExecutor(at_once) as threads:
        list(threads.map(one, jobs))
    return found
