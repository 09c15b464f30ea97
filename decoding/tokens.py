"""What the decoder knows of a tokenizer, as tables on the model's device.

Which ids exist, which end a text, which end the thinking. V real ids of the tokenizer, W logits of a row (the
model's head, padded to whole blocks), S states of the automaton.
"""

import functools
import json
import re
import warnings
from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from errors import SettingError

TAG = re.compile(r"</?[A-Za-z][\w-]*>")
# Ids to wait for the bytes of a whole text: a character has 4, but an id may end one and begin the next.
IDS_TO_WAIT = 16
LOGIT_BLOCK = 128  # the sampler works by blocks of this many logits
# A logit that is never drawn; finite, so that neither p * log p nor a difference of two becomes NaN.
IMPOSSIBLE = -1e30


def whole_blocks(count):
    """The smallest number of logits in whole blocks that holds `count`."""
    return -(-count // LOGIT_BLOCK) * LOGIT_BLOCK


def unwritten_ids(tokenizer, think_end=None):
    """The ids of special tokens that are no part of a decoded text, such as <|im_start|>, <s> or <pad>.

    Tags such as <answer>, and the delimiter `think_end`, are text even where a tokenizer calls them special:
    they are what grading looks for.
    """
    named = set(tokenizer.special_tokens_map.values())  # bos, eos, unk, pad and the like
    special = {i: token.content for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    is_text = lambda text: text == think_end or (TAG.fullmatch(text) and text not in named)  # noqa: E731
    tags = {i for i, text in special.items() if is_text(text)}
    return frozenset({*tokenizer.all_special_ids, *special} - tags)


def token_bytes(tokenizer, count, think_end=None):
    """The bytes that each of the first `count` ids adds to a decoded text; an unwritten one adds none."""
    made_by = tokenizer.backend_tokenizer.decoder
    decoder = "" if made_by is None else json.dumps(json.loads(made_by.__getstate__()), ensure_ascii=False)
    added, unwritten = tokenizer.added_tokens_decoder, unwritten_ids(tokenizer, think_end)
    byte_of_char = _byte_level_alphabet()

    def content(token_id, piece):
        if token_id in unwritten:
            return b""
        if token_id in added:
            return added[token_id].content.encode()
        if piece is None:
            return b""
        if "ByteLevel" in decoder:
            return bytes(byte_of_char[c] for c in piece if c in byte_of_char)
        if "ByteFallback" in decoder and len(piece) == 6 and piece.startswith("<0x"):
            return bytes([int(piece[3:5], 16)])
        return piece.replace("▁", " ").encode() if "▁" in decoder else piece.encode()

    pieces = tokenizer.convert_ids_to_tokens(list(range(count)))
    return [content(token_id, piece) for token_id, piece in enumerate(pieces)]


def token_pieces(tokenizer, ids):
    """The text of each id of a completion, special tokens too; joined they are the whole text.

    A character that several ids make belongs to the last of them. Bytes that are no text become � there or
    soon after. tokenizers' own DecodeStream raises on some of them, and takes quadratic time over many.
    """
    decode = functools.partial(tokenizer.backend_tokenizer.decode, skip_special_tokens=False)
    pieces = []
    # ids[first:start] are done and give `before`; decoded again they show how the next ids join them.
    first, start, before = 0, 0, ""
    for end in range(1, len(ids) + 1):
        text = decode(ids[first:end])
        whole = not text.endswith("�") or end - start >= IDS_TO_WAIT or end == len(ids)
        pieces.append(text[len(before) :] if whole else "")
        if pieces[-1]:
            first, start = start, end
            before = decode(ids[first:start])
    return pieces


def _byte_level_alphabet():
    """GPT-2's printable stand-ins for the 256 bytes: {character: byte}."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def delimiter_automaton(pieces, delimiter):
    """next_state (S, V): follows `delimiter` through a text that arrives as tokens; `pieces` are the bytes of
    each.

    A state is the length matched so far; the last one, S - 1, says that the delimiter was seen, and is never
    left. Exact however the tokenizer splits the delimiter or merges its ends with other text.
    """
    pattern = delimiter.encode()
    final = len(pattern)
    byte_step = np.zeros((final + 1, 256), dtype=np.int64)  # Knuth-Morris-Pratt as a table
    for state in range(final):
        for byte in range(256):
            text = pattern[:state] + bytes([byte])
            lengths = range(min(len(text), final), -1, -1)
            byte_step[state, byte] = next(k for k in lengths if text.endswith(pattern[:k]))
    byte_step[final] = final
    states = np.repeat(np.arange(final + 1)[:, None], len(pieces), axis=1)
    lengths = np.fromiter(map(len, pieces), dtype=np.int64, count=len(pieces))
    text, first = np.frombuffer(b"".join(pieces), dtype=np.uint8), lengths.cumsum() - lengths
    for position in range(lengths.max(initial=0)):  # one byte of every token that still has one
        active = np.flatnonzero(lengths > position)
        states[:, active] = byte_step[states[:, active], text[first[active] + position]]
    return torch.from_numpy(states)


@dataclass
class TokenTables:
    """What the decoder knows of a tokenizer, as tensors on the model's device."""

    num_real: int  # ids at or past this are in the embedding only
    pad_id: int
    eos_ids: list[int]
    is_eos: torch.Tensor  # (V,) bool
    missing: torch.Tensor | None  # (V,) bool, ids below num_real that no token has
    real: torch.Tensor  # (W,) bool, ids that a token has
    next_state: torch.Tensor  # (S, V)


def _as_list(value):
    """An eos_token_id as a list; some configs have one id, some several, some none."""
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def eos_token_ids(tokenizer, model):
    """The EOS ids of tokenizer, config and generation config: any of them ends a completion (TRL PR#7039)."""
    sources = (tokenizer, model.config.get_text_config(), model.generation_config)
    ids = [i for source in sources for i in _as_list(getattr(source, "eos_token_id", None))]
    if not ids:
        raise SettingError(
            "model",
            model.config.name_or_path,
            "neither the tokenizer nor the model's configs name an EOS token:"
            " set eos_token in tokenizer_config.json",
        )
    if wrong := [i for i in ids if type(i) is not int]:
        files = "config.json or generation_config.json"
        remedy = f"eos_token_id holds {wrong[0]!r} in {files}, which is no whole number"
        raise SettingError("model", model.config.name_or_path, remedy)
    return sorted({i for i in ids if i >= 0})  # some configs write -1 for none


def end_answers_on(eos_id, tokenizer, *models):
    """Let `eos_id` end completions, beside the EOS ids that there are: what training teaches as the end.

    The models' generation configs name them all, and are saved with the models.
    """
    for model in models:
        settings, before = model.generation_config, model.generation_config.eos_token_id
        settings.eos_token_id = _as_list(before) + _as_list(eos_id)
        ids = eos_token_ids(tokenizer, model)
        settings.eos_token_id = before if set(ids) == set(_as_list(before)) else ids


def _warn_of_usual_ends(tokenizer, eos_ids, name):
    """transformers' configs have an eos_token_id by default, such as 2, which may be any token here."""
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    if usual := [i for i in eos_ids if i not in special]:
        token = tokenizer.convert_ids_to_tokens(usual[0])
        what = f"its configs name eos_token_id {usual[0]}, which is the usual token {token!r}"
        remedy = "completions end wherever they have it: mend config.json or generation_config.json"
        warnings.warn(f"model={name!r}: {what}; {remedy}", stacklevel=2)


def token_tables(tokenizer, model, think_end=None):
    """Read tokenizer and model once. `think_end`: the delimiter that ends thinking, or None."""
    table_size = model.get_input_embeddings().weight.shape[0]
    known = set(tokenizer.get_vocab().values())
    num_real, device, name = max(known) + 1, model.device, model.config.name_or_path
    if num_real > table_size:
        sizes = f"the tokenizer has ids up to {max(known)}, the model embeds only {table_size}"
        raise SettingError("model", name, f"{sizes}: they do not belong together")
    eos_ids = [i for i in eos_token_ids(tokenizer, model) if i < num_real]
    if not eos_ids:
        remedy = "no EOS id of tokenizer, config or generation config is one that the tokenizer has"
        raise SettingError("model", name, remedy)
    _warn_of_usual_ends(tokenizer, eos_ids, name)
    is_eos = torch.zeros(num_real, dtype=torch.bool)
    is_eos[eos_ids] = True
    real = torch.zeros(whole_blocks(table_size), dtype=torch.bool)
    real[list(known)] = True
    if think_end:
        next_state = delimiter_automaton(token_bytes(tokenizer, num_real, think_end), think_end)
    else:
        next_state = torch.zeros(2, num_real, dtype=torch.long)
    return TokenTables(
        num_real=num_real,
        pad_id=eos_ids[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
        eos_ids=eos_ids,
        is_eos=is_eos.to(device),
        missing=(~real[:num_real]).to(device) if len(known) < num_real else None,
        real=real.to(device),
        next_state=next_state.to(device),
    )


ARITHMETIC_WORDS = (
    "Ann Bob Eve Tom Sue Max Liz Dan pens cups eggs cards books apples coins balls gets buys loses sells"
    " has and more How many does have now"
).split()


def arithmetic_tokenizer():
    """For the generated arithmetic problems: one token a word (with the space before it), tag, digit or sign.

    Decoding gives back the text that was encoded, to the letter. Its chat template leaves the system message
    out: a model of this size learns the format from its warm start.
    """
    special = ["<|pad|>", "<|eos|>", "<|user|>", "<|assistant|>", "<unk>"]
    tags = ["<reasoning>", "</reasoning>", "<answer>", "</answer>"]
    spaced = [f" {word}" for word in ARITHMETIC_WORDS]
    tokens = [*special, *tags, *"\n .?+-=0123456789", *ARITHMETIC_WORDS, *spaced, "#"]
    raw = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(r"</?[a-z]+>| ?[A-Za-z]+|\n|."), "isolated")
    raw.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token="<|eos|>",
        pad_token="<|pad|>",
        unk_token="<unk>",
        additional_special_tokens=["<|user|>", "<|assistant|>"],
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = (
        "{% for m in messages %}"
        "{% if m['role'] == 'user' %}<|user|>{{ m['content'] }}"
        "{% elif m['role'] == 'assistant' %}<|assistant|>{{ m['content'] }}<|eos|>{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    return tokenizer
