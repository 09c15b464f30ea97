"""The fast path: the decoder layers of Llama, Qwen2 and Qwen3 over fixed storage.

The keys and values of a prompt are stored once, in a slot, for all the paths that continue it; those of a
completion in a row of their own. Column j of either belongs to its token j: nothing is padded on the left, so
there is no mask, only two lengths. Completions lie in chunks of C tokens of all rows, which are taken when a
row gets so far: the limit of a completion costs nothing that is not said.

n rows being decoded, R rows and S slots of storage, M tokens of any kind, P prompt tokens; H query heads and
K key heads of width D; E embedding width, W logits.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from decoding.any_model import FAMILIES, known_family
from decoding.building import start_compile_workers, why_no_kernels
from decoding.rollout import pad_right, to_device
from decoding.step import by_group, norm_shrink
from decoding.tokens import whole_blocks

kernels = None

if why_no_kernels() is None:
    from decoding import kernels

PREFILL_TOKENS = 2**15  # tokens that go through the model at once; bounds memory
CHUNK = 512  # tokens of each row that storage grows by, at most
FEW = 2**16  # up to this many numbers in the residual stream, few fused kernels are faster


class Shape(NamedTuple):
    heads: int
    key_heads: int
    head_dim: int
    eps: float


class Layer(NamedTuple):
    """Weights of a decoder layer; q, k and v are one matrix, and so are gate and up: fewer kernels."""

    norm_in: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: torch.Tensor
    o_bias: torch.Tensor | None
    norm_mid: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None


def rms_norm(x, weight, eps):
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def rotate(x, cos, sin):
    """Rotary position embedding: x (M, heads, D), cos and sin (M, D)."""
    left, right = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat((-right, left), -1) * sin[:, None]


def into_attention(x, change, w: Layer, shape: Shape):
    """The residual stream (M, E) and what the layer before adds to it -> their sum and q, k, v.

    Queries (M, H, D), keys and values (M, K, D) are not yet rotated.
    """
    x = add(x, change)
    return x, *heads(F.linear(rms_norm(x, w.norm_in, shape.eps), w.qkv, w.qkv_bias), w, shape)


def heads(projected, w: Layer, shape: Shape):
    q, k, v = projected.view(projected.shape[0], -1, shape.head_dim).split(
        [shape.heads, shape.key_heads, shape.key_heads], dim=1
    )
    if w.q_norm is not None:
        q, k = rms_norm(q, w.q_norm, shape.eps), rms_norm(k, w.k_norm, shape.eps)
    return q, k, v


def out_of_attention(x, attended, w: Layer, shape: Shape):
    """(M, E) and what attention gave (M, H*D) -> the residual stream, and what the MLP adds to it."""
    x = add(x, F.linear(attended, w.o, w.o_bias))
    gate, up = F.linear(rms_norm(x, w.norm_mid, shape.eps), w.gate_up, w.gate_up_bias).chunk(2, -1)
    return x, F.linear(F.silu(gate) * up, w.down, w.down_bias)


def enter_norm(x, weight):
    """x (M, E) as `Normed` has it: times the norm's weight, and the sums of its squares (M, 1)."""
    return x * norm_shrink(x.dtype) * weight, x.float().pow(2).sum(-1, keepdim=True)


def leave_norm(scaled, squares, eps):
    size = torch.rsqrt(squares.sum(-1, keepdim=True) / scaled.shape[1] + eps) / norm_shrink(scaled.dtype)
    return (scaled * size).to(scaled.dtype)


def add(x, change):
    """The sum in float32, which rounds once, as the sum in x's own dtype does.

    So the compiler joins it to the norm that follows, and not to the product before.
    """
    return (x.float() + change.float()).to(x.dtype)


def head_input(x, change, weight, eps):
    return rms_norm(add(x, change), weight, eps)


class LayerCache(NamedTuple):
    """Keys (first) and values of one layer, and the rotary tables."""

    prompt: torch.Tensor  # (2, S, K, P, D)
    chunks: list  # of (2, R, K, C, D): the first C tokens of each completion, the next C, ...
    addresses: torch.Tensor  # (chunks at the limit, 2) int64, where their keys and their values are
    slot_len: torch.Tensor  # (S,) tokens of the prompt in each slot
    cos: torch.Tensor  # (P + the limit, D)
    sin: torch.Tensor  # (P + the limit, D)


def attend(q, k, v, cache, rows, row_of_path, scale):
    """One new token a row over its prompt and its completion so far, in plain torch.

    q (n, H, D), k and v (n, K, D), not yet rotated -> (n, H*D). row_of_path (S, G) holds the row of path g of
    slot s, n where it has none. The G paths of a slot are folded into the queries of its keys, and so are the
    H / K heads that share a key head: keys are read once and never copied.
    """
    (n, H, D), G, K = q.shape, row_of_path.shape[1], k.shape[1]
    past, prompt_len = (rows.t - 1).clamp(min=0), cache.slot_len[: len(row_of_path)]
    index, positions = torch.arange(n, device=q.device), cache.slot_len[rows.slot] + past
    q, k = (rotate(x, cache.cos[positions], cache.sin[positions]) for x in (q, k))
    C, longest = cache.chunks[0].shape[3], int(past.max()) + 1
    chunks = cache.chunks[: -(-longest // C)]
    for i, (keys, values) in enumerate(chunks):
        if len(chunks) == 1:
            keys[index, :, past], values[index, :, past] = k, v
        else:
            here = index[past // C == i]
            keys[here, :, past[here] % C], values[here, :, past[here] % C] = k[here], v[here]
    prompt_keys = max(int(prompt_len.max()), 1)
    prompt_k, prompt_v = cache.prompt[:, : len(row_of_path), :, :prompt_keys]
    said = [chunk[:, :n, :, : longest - i * C] for i, chunk in enumerate(chunks)]
    tokens = torch.arange(longest, device=q.device).split(C)

    def by_slot(x):  # (n, K, r, _) -> (S, K, G*r, _)
        return by_group(x, row_of_path).transpose(1, 2).flatten(2, 3)

    def by_row(x):  # (S, K, G*r, _) -> (n, K, r, _)
        return x.unflatten(2, (G, H // K)).transpose(1, 2)[rows.slot, rows.path]

    def bias(inside):  # 0 where a key is the row's or the slot's, -inf past its end
        return torch.where(inside, 0.0, -torch.inf)[:, None, None]

    q = q.view(n, K, H // K, D) * scale
    to_prompt = by_slot(q) @ prompt_k.mT + bias(
        torch.arange(prompt_keys, device=q.device) < prompt_len[:, None]
    )
    to_completion = [
        q @ keys.mT + bias(token <= past[:, None]) for (keys, _), token in zip(said, tokens, strict=True)
    ]
    weights = torch.cat((by_row(to_prompt), *to_completion), -1).softmax(-1)
    out = by_row(by_slot(weights[..., :prompt_keys]) @ prompt_v)
    for part, (_, values) in zip(weights[..., prompt_keys:].split(C, -1), said, strict=True):
        out = out + part @ values
    return out.flatten(1)


def why_not(model):
    """Why the fast path cannot serve this model, or None."""
    config = model.config.get_text_config()
    if model.device.type == "cuda" and kernels is None:
        return why_no_kernels()
    if config.model_type not in FAMILIES:
        return f"model type {config.model_type}; it knows {', '.join(FAMILIES)}"
    if not known_family(config):
        return "sliding-window attention"
    if config.hidden_act != "silu":
        return f"activation {config.hidden_act}"
    if config.rope_parameters["rope_type"] not in ("default", "linear", "llama3", "yarn"):
        return f"rotary embedding {config.rope_parameters['rope_type']}, which changes with the length"
    linear = [m for name, m in model.named_modules() if name.endswith(("_proj", "lm_head"))]
    if any(type(m) is not torch.nn.Linear for m in linear) or model.get_output_embeddings().bias is not None:
        return "layers that are not plain matrix products"
    return None


def tokens_of_chunk(limit):
    """C for completions of at most `limit` tokens: as few equal chunks of at most CHUNK as hold them."""
    return -(-limit // -(-limit // CHUNK))


class FastBackbone:
    """Runs a supported model over fixed storage.

    The model's own parameters become views into it, so that a change in place is seen at once.
    """

    refills = True

    def __init__(self, model, compiled):
        body, config, head = model.base_model, model.config.get_text_config(), model.get_output_embeddings()
        attention = body.layers[0].self_attn
        self.model, self.compiled, self.logit_dtype = model, compiled, model.dtype
        self.on_cuda = model.device.type == "cuda"
        self.shape = Shape(
            config.num_attention_heads, config.num_key_value_heads, attention.head_dim, config.rms_norm_eps
        )
        self.scale = attention.scaling
        if compiled:
            start_compile_workers()
        functions = (into_attention, out_of_attention, head_input, enter_norm, leave_norm)
        self.into, self.out_of, self.head, self.enter, self.leave = (
            torch.compile(f) if compiled else f for f in functions
        )
        self.views = []  # (parameter, the view it must be)
        self.layers = [self._layer(layer) for layer in body.layers]
        self.norm = self._weight(body.norm)
        self.width = whole_blocks(len(head.weight))
        self.head_weight = self._joined([head], "weight", self.width)
        tied = body.embed_tokens.weight is head.weight
        self.table = self.head_weight[: len(head.weight)] if tied else self._weight(body.embed_tokens)
        self.reclaim_weights()

    def _joined(self, modules, name, rows=None):
        """One tensor of a parameter of several modules, one below the other; None if they have none."""
        parts = [getattr(m, name, None) for m in modules]
        if parts[0] is None:
            return None
        rows = rows or sum(map(len, parts))
        if len(parts) == 1 and len(parts[0]) == rows:
            whole = parts[0].data
        else:
            whole = parts[0].new_zeros(rows, *parts[0].shape[1:], requires_grad=False)
        start = 0
        for part in parts:
            self.views.append((part, whole[start : start + len(part)]))
            start += len(part)
        return whole

    def _weight(self, module, name="weight"):
        return self._joined([module], name)

    def _layer(self, layer):
        a, m = layer.self_attn, layer.mlp
        qkv, gate_up = [a.q_proj, a.k_proj, a.v_proj], [m.gate_proj, m.up_proj]
        made = Layer(
            norm_in=self._weight(layer.input_layernorm),
            qkv=self._joined(qkv, "weight"),
            qkv_bias=self._joined(qkv, "bias"),
            q_norm=self._weight(getattr(a, "q_norm", None)),
            k_norm=self._weight(getattr(a, "k_norm", None)),
            o=self._weight(a.o_proj),
            o_bias=self._weight(a.o_proj, "bias"),
            norm_mid=self._weight(layer.post_attention_layernorm),
            gate_up=self._joined(gate_up, "weight"),
            gate_up_bias=self._joined(gate_up, "bias"),
            down=self._weight(m.down_proj),
            down_bias=self._weight(m.down_proj, "bias"),
        )
        self.reclaim_weights()
        return made

    def reclaim_weights(self):
        """Make every parameter the view it must be, with the values of any storage it was given since."""
        for parameter, view in self.views:
            if parameter.data_ptr() != view.data_ptr():
                view.copy_(parameter.data)
                parameter.data = view

    def forget(self, limit):
        """Empty every slot, so that a step attends no further than this call's longest prompt.

        On CUDA a step reads nothing past a row's end. Elsewhere it multiplies what is there by 0, and 0 times
        an earlier call's inf is NaN. It adds up chunk by chunk, as wide as those of a call that comes first.
        """
        self.slot_len.zero_()
        if self.on_cuda:
            return
        if self.chunk_tokens < limit and self.chunk_tokens != tokens_of_chunk(limit):
            self.chunks, self.chunk_tokens = [], tokens_of_chunk(limit)
            self.grow(1)
        for kept in (self.prompt, *self.chunks):
            kept.zero_()

    def reserve(self, rows, slots, prompt, length):
        """Storage for keys and values of prompts, and for the first of completions; the rotary tables."""
        K, D, like = self.shape.key_heads, self.shape.head_dim, self.head_weight
        self.prompt, self.chunks = None, []  # free the old before the new is taken
        self.prompt = like.new_zeros(len(self.layers), 2, slots, K, prompt, D, requires_grad=False)
        most = -(-length // CHUNK)
        self.rows, self.chunk_tokens = rows, tokens_of_chunk(length)
        self.addresses = torch.zeros(len(self.layers), most, 2, dtype=torch.long, device=like.device)
        self.grow(1)
        self.counter = torch.zeros(max(rows * K, 4096), dtype=torch.int32, device=like.device)
        self.slot_len = torch.zeros(slots, dtype=torch.long, device=like.device)
        positions = torch.arange(prompt + length, device=like.device)[None]
        self.cos, self.sin = (
            x[0].contiguous() for x in self.model.base_model.rotary_emb(like[:1], positions)
        )

    def grow(self, longest):
        """Take storage for completions of `longest` tokens, as far as there is none.

        Steps that are captured find it by its address: they stay valid.
        """
        K, C, D, like = self.shape.key_heads, self.chunk_tokens, self.shape.head_dim, self.head_weight
        while len(self.chunks) * C < longest:
            chunk = like.new_zeros(len(self.layers), 2, self.rows, K, C, D, requires_grad=False)
            addresses = [[side.data_ptr() for side in layer] for layer in chunk]
            self.addresses[:, len(self.chunks)] = to_device(addresses, like.device)
            self.chunks.append(chunk)

    def row_bytes(self, tokens):
        """Memory of a row with a prompt of its own and `tokens` tokens in all."""
        numbers = len(self.layers) * 2 * self.shape.key_heads * self.shape.head_dim * tokens + 2 * self.width
        return numbers * self.head_weight.element_size()

    def storage_bytes(self):
        """Memory that keys and values have taken so far."""
        return sum(tensor.nbytes for tensor in (self.prompt, *self.chunks))

    def bytes_to_come(self):
        """Memory that they will still take where completions reach their limit."""
        return (self.addresses.shape[1] - len(self.chunks)) * self.chunks[0].nbytes

    def embed(self, tokens):
        return self.table[tokens]

    def prefill(self, prompts, slots, logits, rows, repeat):
        """Each prompt once: keys and values into its slot, next-token logits into its `repeat` rows."""
        at_once = max(1, PREFILL_TOKENS // max(map(len, prompts)))
        for i in range(0, len(prompts), at_once):
            made = self._prefill(prompts[i : i + at_once], slots[i : i + at_once])
            logits[rows[i * repeat : (i + at_once) * repeat]] = made.repeat_interleave(repeat, 0)

    def _prefill(self, prompts, slots):
        """Next-token logits (m, W) of m prompts, padded on the right, where causal attention never looks."""
        device, (H, K, D, _) = self.head_weight.device, self.shape
        ids, _ = pad_right(prompts, 0)
        m, P = ids.shape
        lengths, slots = to_device([len(prompt) for prompt in prompts], device), to_device(slots, device)
        self.slot_len[slots] = lengths
        x = self.embed(to_device(ids, device).flatten())
        cos, sin = self.cos[:P].repeat(m, 1), self.sin[:P].repeat(m, 1)
        change = torch.zeros_like(x)
        for w, cache in zip(self.layers, self.prompt, strict=True):
            x, q, k, v = self.into(*self.mark_dynamic(x, change), w, self.shape)
            heads_first = (rotate(q, cos, sin), rotate(k, cos, sin), v)
            q, k, v = (t.view(m, P, -1, D).transpose(1, 2) for t in heads_first)
            cache[0, slots, :, :P], cache[1, slots, :, :P] = k, v
            attended = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=self.scale, enable_gqa=K != H
            )
            attended = attended.transpose(1, 2).reshape(m * P, H * D)
            x, change = self.out_of(*self.mark_dynamic(x, attended), w, self.shape)
        last = torch.arange(m, device=device) * P + lengths - 1
        states = self.head(*self.mark_dynamic(x[last], change[last]), self.norm, self.shape.eps)
        return states @ self.head_weight.T

    def decode(self, x, rows, row_of_path):
        """One step of n rows: inputs (n, E) -> rows.logits (n, W), written in place."""
        past = (rows.t - 1).clamp(min=0)
        if self.on_cuda and x.numel() <= FEW:
            last = self._decode_few(x, rows, past)
        else:
            change = torch.zeros_like(x)
            for i, w in enumerate(self.layers):
                x, q, k, v = self.into(*self.mark_dynamic(x, change), w, self.shape)
                attended = self._attend(i, q, k, v, rows, past, row_of_path)
                x, change = self.out_of(*self.mark_dynamic(x, attended), w, self.shape)
            last = self.head(*self.mark_dynamic(x, change), self.norm, self.shape.eps)
        torch.mm(last, self.head_weight.T, out=rows.logits)

    def _decode_few(self, x, rows, past):
        """The same in five kernels a layer: few rows wait for memory and for kernels to start."""
        eps, counter, linear = self.shape.eps, self.counter, kernels.few_rows_linear
        x = kernels.Normed(x, *self.enter(*self.mark_dynamic(x), self.layers[0].norm_in))
        norms = [w.norm_in for w in self.layers[1:]] + [self.norm]
        for i, (w, norm) in enumerate(zip(self.layers, norms, strict=True)):
            q, k, v = heads(linear(x, w.qkv, w.qkv_bias, counter, eps=eps), w, self.shape)
            attended = self._attend(i, q, k, v, rows, past)
            x = linear(attended, w.o, w.o_bias, counter, residual=x.x, norm=w.norm_mid)
            inner = linear(x, w.gate_up, w.gate_up_bias, counter, gated=True, eps=eps)
            x = linear(inner, w.down, w.down_bias, counter, residual=x.x, norm=norm)
        return self.leave(*self.mark_dynamic(x.scaled, x.squares), eps)

    def _attend(self, layer, q, k, v, rows, past, row_of_path=None):
        chunks = [chunk[layer] for chunk in self.chunks]
        lookup = (self.addresses[layer], self.slot_len, self.cos, self.sin)
        cache = LayerCache(self.prompt[layer], chunks, *lookup)
        if self.on_cuda:
            return kernels.decode_attention(q, k, v, cache, rows, past, self.counter, self.scale)
        return attend(q, k, v, cache, rows, row_of_path, self.scale)

    def mark_dynamic(self, *tensors):
        """Tell the compiler that the number of rows changes from call to call."""
        for tensor in tensors if self.compiled else ():
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return tensors

    def select_rows(self, order, longest):
        """Rows `order` become the first ones; none has more than `longest` tokens.

        On CUDA nothing moves: the kernel looks up where a row's keys are.
        """
        for i, chunk in enumerate(self.chunks if not self.on_cuda else ()):
            said = max(0, longest - i * self.chunk_tokens)
            for side in chunk.flatten(0, 1):
                side[: len(order), :, :said] = side[order, :, :said]
