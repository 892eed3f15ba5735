"""The three kinds in torch, with the names and shapes of mlx-lm's parameters."""

from __future__ import annotations

import math
from typing import TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor, nn

from .kinds import Config

Tables: TypeAlias = tuple[Tensor, Tensor]
CHUNK = 64  # tokens that the delta rule takes at once


def autocast(device: str) -> torch.autocast:
    """Products in bfloat16 on a GPU; not every CPU has them."""
    return torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda")


class Norm(nn.Module):
    """RMS norm; Gemma keeps its weight less one."""

    def __init__(self, n: int, config: Config) -> None:
        super().__init__()
        self.eps = config["rms_norm_eps"]
        self.plus = 1.0 if config["model_type"] == "gemma3_text" else 0.0
        self.weight = nn.Parameter(torch.full((n,), 1.0 - self.plus))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight + self.plus, self.eps)


class Rope(nn.Module):
    """Rotates the first dimensions of a head, in halves."""

    def __init__(self, n: int, base: float, max_len: int) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(max_len).float(), base ** (-torch.arange(0, n, 2) / n))
        self.n = n
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        a, b = x[..., : self.n].chunk(2, -1)
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
        return torch.cat([turned, x[..., self.n :].float()], -1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: Config, window: int | None) -> None:
        super().__init__()
        self.type = config["model_type"]
        self.window = window
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.dim, width = config["head_dim"], config["hidden_size"]
        gates = 2 if self.type == "qwen3_next" else 1
        self.q_proj = nn.Linear(width, self.heads * self.dim * gates, bias=False)
        self.k_proj = nn.Linear(width, self.kv_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(width, self.kv_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, width, bias=False)
        if self.type != "llama":
            self.q_norm = Norm(self.dim, config)
            self.k_norm = Norm(self.dim, config)
        base = config["rope_local_base_freq"] if window else config["rope_theta"]
        n_turned = int(self.dim * config.get("partial_rotary_factor", 1.0))
        self.rope = Rope(n_turned, base, config["max_position_embeddings"])

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, *gate = self.q_proj(x).view(b, t, self.heads, -1).split(self.dim, -1)
        k = self.k_proj(x).view(b, t, self.kv_heads, self.dim)
        v = self.v_proj(x).view(b, t, self.kv_heads, self.dim)
        if self.type != "llama":
            q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        q, k = self.rope(q), self.rope(k)
        k, v = (y.repeat_interleave(self.heads // self.kv_heads, 1) for y in (k, v))
        out = in_window(q, k, v, self.window) if self.window else causal(q, k, v)
        out = out.transpose(1, 2).reshape(b, t, -1)
        if gate:
            out = out * gate[0].reshape(b, t, -1).sigmoid()
        return self.o_proj(out)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def in_window(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Attention to the last `window` tokens, in blocks that see the one before too."""
    b, h, t, d = q.shape
    if t <= window:
        return causal(q, k, v)
    n = -(-t // window)
    q, k, v = (F.pad(x, (0, 0, 0, n * window - t)).view(b, h, n, window, d) for x in (q, k, v))
    k, v = (torch.cat([F.pad(x, (0, 0, 0, 0, 1, 0))[:, :, :-1], x], 3) for x in (k, v))
    q, k, v = (x.transpose(1, 2).reshape(b * n, h, -1, d) for x in (q, k, v))
    i = torch.arange(window, device=q.device)[:, None]
    j = torch.arange(2 * window, device=q.device)[None]
    seen = ((j > i) & (j <= window + i)).repeat(n, 1, 1)
    seen[0, :, :window] = False  # nothing is before the first block
    mask = seen.repeat(b, 1, 1).unsqueeze(1)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return out.view(b, n, h, window, d).transpose(1, 2).reshape(b, h, n * window, d)[:, :, :t]


class Convolution(nn.Module):
    """A short causal convolution of each channel."""

    def __init__(self, channels: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, size, 1).uniform_(-0.5, 0.5))

    def forward(self, x: Tensor) -> Tensor:
        size, t = self.weight.shape[1], x.shape[1]
        padded = F.pad(x, (0, 0, size - 1, 0))
        weight = self.weight.to(x.dtype)
        return sum(padded[:, i : i + t] * weight[:, i, 0] for i in range(size))


class DeltaNet(nn.Module):
    """Gated delta net: a state of fixed size instead of keys and values."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.k_heads, self.v_heads = (
            config["linear_num_key_heads"],
            config["linear_num_value_heads"],
        )
        self.k_dim, self.v_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
        self.repeats = self.v_heads // self.k_heads
        width, n_k, n_v = (
            config["hidden_size"],
            self.k_heads * self.k_dim,
            self.v_heads * self.v_dim,
        )
        self.conv1d = Convolution(2 * n_k + n_v, config["linear_conv_kernel_dim"])
        self.in_proj_qkvz = nn.Linear(width, 2 * n_k + 2 * n_v, bias=False)
        self.in_proj_ba = nn.Linear(width, 2 * self.v_heads, bias=False)
        steps = torch.exp(torch.empty(self.v_heads).uniform_(math.log(1e-3), math.log(1e-1)))
        self.dt_bias = nn.Parameter(steps + torch.log(-torch.expm1(-steps)))
        self.A_log = nn.Parameter(torch.empty(self.v_heads).uniform_(1, 16).log())
        self.norm = Norm(self.v_dim, config)
        self.out_proj = nn.Linear(n_v, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v, z, beta, decay = self._inputs(x)
        with torch.autocast(x.device.type, enabled=False):
            out = delta_rule(q, k, v, beta, decay)
            out = self.norm(out.transpose(1, 2)) * F.silu(z.float())
        return self.out_proj(out.reshape(b, t, -1))

    def _inputs(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys, values, steps and log decays by head, and the gate."""
        b, t, _ = x.shape
        n_v = self.repeats * self.v_dim
        mixed = self.in_proj_qkvz(x).view(b, t, self.k_heads, -1)
        q, k, v, z = mixed.split([self.k_dim, self.k_dim, n_v, n_v], -1)
        beta, a = self.in_proj_ba(x).view(b, t, self.k_heads, -1).chunk(2, -1)
        qkv = torch.cat([y.reshape(b, t, -1) for y in (q, k, v)], -1)
        qkv = F.silu(self.conv1d(qkv)).float()
        n_k = self.k_heads * self.k_dim
        q, k, v = qkv.split([n_k, n_k, self.v_heads * self.v_dim], -1)
        q, k = (self._unit(y.view(b, t, self.k_heads, self.k_dim)) for y in (q, k))
        v = v.view(b, t, self.v_heads, self.v_dim)
        a = a.reshape(b, t, self.v_heads).float()
        decay = -self.A_log.exp() * F.softplus(a + self.dt_bias)
        beta = beta.reshape(b, t, self.v_heads).float().sigmoid()
        z = z.reshape(b, t, self.v_heads, self.v_dim)
        q = q * self.k_dim**-0.5
        return (
            *(y.transpose(1, 2) for y in (q, k, v)),
            z,
            *(y.transpose(1, 2) for y in (beta, decay)),
        )

    def _unit(self, x: Tensor) -> Tensor:
        x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
        return x.repeat_interleave(self.repeats, 2)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor) -> Tensor:
    """S ← e^decay S; S ← S + k βᵀ(v - kᵀS); out = qᵀS, for all tokens, in chunks at once.

    Inside a chunk the updates solve a triangular system. Between chunks the state changes by an
    affine map, and maps are composed in log₂ steps instead of one chunk after the other.
    """
    b, h, t, d = v.shape
    n = -(-t // CHUNK)
    pad = n * CHUNK - t
    q, k, v = (F.pad(x, (0, 0, 0, pad)).view(b, h, n, CHUNK, -1) for x in (q, k, v))
    beta, decay = (F.pad(x, (0, pad)).view(b, h, n, CHUNK) for x in (beta, decay))
    total = decay.cumsum(-1)
    later = torch.ones(CHUNK, CHUNK, device=v.device, dtype=torch.bool).triu(1)
    between = (total[..., :, None] - total[..., None, :]).masked_fill(later, -math.inf).exp()
    system = (beta[..., None] * (k @ k.mT) * between).tril(-1)
    right = torch.cat([beta[..., None] * v, (beta * total.exp())[..., None] * k], -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    values, keys = solved.split([d, k.shape[-1]], -1)
    kept = k * (total[..., -1:] - total).exp()[..., None]
    identity = torch.eye(k.shape[-1], device=v.device)
    factor = total[..., -1].exp()[..., None, None] * identity - kept.mT @ keys
    states = _states(factor, kept.mT @ values)
    updates = values - keys @ states
    out = total.exp()[..., None] * (q @ states) + ((q @ k.mT) * between) @ updates
    return out.reshape(b, h, n * CHUNK, d)[:, :, :t]


def _states(factor: Tensor, term: Tensor) -> Tensor:
    """The state before each chunk, where a chunk makes S of S: factor @ S + term."""
    step, n = 1, term.shape[2]
    while step < n:
        term = torch.cat(
            [term[:, :, :step], term[:, :, step:] + factor[:, :, step:] @ term[:, :, :-step]], 2
        )
        factor = torch.cat([factor[:, :, :step], factor[:, :, step:] @ factor[:, :, :-step]], 2)
        step *= 2
    return F.pad(term, (0, 0, 0, 0, 1, 0))[:, :, :-1]


class Mlp(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        width, inner = config["hidden_size"], config["intermediate_size"]
        self.is_gemma = config["model_type"] == "gemma3_text"
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x)
        gate = F.gelu(gate, approximate="tanh") if self.is_gemma else F.silu(gate)
        return self.down_proj(gate * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: Config, index: int) -> None:
        super().__init__()
        width, kind = config["hidden_size"], config["model_type"]
        every = config.get("full_attention_interval") or config.get("sliding_window_pattern") or 1
        is_global = (index + 1) % every == 0
        if kind == "qwen3_next" and not is_global:
            self.linear_attn = DeltaNet(config)
        else:
            self.self_attn = Attention(config, None if is_global else config["sliding_window"])
        self.mlp = Mlp(config)
        self.input_layernorm = Norm(width, config)
        self.post_attention_layernorm = Norm(width, config)
        self.has_outer_norms = kind == "gemma3_text"
        if self.has_outer_norms:
            self.pre_feedforward_layernorm = Norm(width, config)
            self.post_feedforward_layernorm = Norm(width, config)

    def forward(self, x: Tensor) -> Tensor:
        mixer = self.linear_attn if hasattr(self, "linear_attn") else self.self_attn
        mixed = mixer(self.input_layernorm(x))
        if not self.has_outer_norms:
            x = x + mixed
            return x + self.mlp(self.post_attention_layernorm(x))
        x = x + self.post_attention_layernorm(mixed)
        inner = self.mlp(self.pre_feedforward_layernorm(x))
        return x + self.post_feedforward_layernorm(inner)


class Body(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config["num_hidden_layers"]))
        self.norm = Norm(config["hidden_size"], config)
        self.scale = config["hidden_size"] ** 0.5 if config["model_type"] == "gemma3_text" else 1.0

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens) * self.scale
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Net(nn.Module):
    """Tokens to logits; the output is the embedding, transposed."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.model = Body(config)
        nn.init.normal_(self.model.embed_tokens.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.model(tokens), self.model.embed_tokens.weight)
