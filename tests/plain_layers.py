"""Layers by plain definitions, written apart from the engine: the parts of `free_mix_model.py`.

Whatever has a closed form over the whole sequence takes that form here, where the engine runs a recurrence: every
result is then a sum over earlier tokens, without a state, chunks or caches. Positions are 0, 1, 2, ...
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def linear(rows: int, columns: int, bias: bool = False) -> nn.Linear:
    return nn.Linear(columns, rows, bias=bias)


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(shape))


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.weight


class Conv(nn.Module):
    """Depthwise, causal, then SiLU."""

    def __init__(self, channels: int, width: int, bias: bool) -> None:
        super().__init__()
        self.weight = weight(channels, width)
        self.bias = weight(channels) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        channels, width = self.weight.shape
        y = F.conv1d(F.pad(x.T, (width - 1, 0)), self.weight[:, None], self.bias, groups=channels)
        return F.silu(y.T)


def turn(x: Tensor, rope: dict[str, Any] | None) -> Tensor:
    """Channels i and i + dim / 2 of each head are one complex number, turned by position / theta^(2 i / dim)."""
    if rope is None:
        return x
    half = rope["dim"] // 2
    speed = rope.get("rope_theta", 1e4) ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(len(x), dtype=torch.float32)[:, None] * speed.float()  # it and its table: float32 in any model
    exact = torch.polar(torch.ones_like(angle, dtype=torch.float64), angle.double())
    table = exact.to(torch.complex64).to(torch.complex128).unsqueeze(1)
    z = torch.complex(x[..., :half].double(), x[..., half : 2 * half].double()) * table
    return torch.cat([z.real.to(x.dtype), z.imag.to(x.dtype), x[..., 2 * half :]], dim=-1)


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """q, k, v `[T, heads, dim]`, `visible[t, s]`."""
    scores = torch.einsum("thd,shd->hts", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("hts,shd->thd", scores.masked_fill(~visible, -torch.inf).softmax(-1), v)


class Heads(nn.Module):
    """Projections to q, k, v; k and v repeated for every query head."""

    def __init__(self, hidden: int, options: dict[str, Any], ropes: list[dict[str, Any]]) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = options["num_heads"], options["num_kv_heads"], options["head_dim"]
        self.gated = options.get("output_gate", False)
        self.qkv = linear((self.heads * (1 + self.gated) + 2 * self.kv_heads) * self.dim, hidden)
        self.dense = linear(hidden, self.heads * self.dim)
        if options.get("qk_norm", "none") == "head":
            self.q_norm, self.k_norm = Norm(self.dim), Norm(self.dim)
        self.rope = None if options.get("rope") is None else ropes[options["rope"]]
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).unflatten(1, (-1, self.dim))
        q, gate, k, v = parts.split([self.heads, self.heads * self.gated, self.kv_heads, self.kv_heads], dim=1)
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        k, v = (part.repeat_interleave(self.heads // self.kv_heads, dim=1) for part in (k, v))
        y = self.attend(q, k, v)
        return self.dense((y * gate.sigmoid() if self.gated else y).flatten(1))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise NotImplementedError


class Attention(Heads):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
        window = self.options.get("window") or len(q)
        return softmax_attention(turn(q, self.rope), turn(k, self.rope), v, (distance >= 0) & (distance < window))


class LengthRouted(Heads):
    """Softmax attention up to the limit; after it weights (elu(q) + 1) . (elu(k) + 1) over all earlier tokens."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        earlier = torch.ones(len(q), len(q), dtype=torch.bool).tril()
        full = softmax_attention(turn(q, self.rope), turn(k, self.rope), v, earlier)
        scores = torch.einsum("thd,shd->hts", F.elu(q) + 1, F.elu(k) + 1) * earlier
        weights = scores / scores.sum(-1, keepdim=True)
        linear = torch.einsum("hts,shd->thd", weights, v)
        limit = self.options["limit"]
        return torch.cat([full[:limit], linear[limit:]])


class LowRank(Heads):
    """For every t the first t + 1 keys and values, compressed to `rank` rows by the table."""

    def __init__(self, hidden: int, options: dict[str, Any], ropes: list[dict[str, Any]], positions: int) -> None:
        super().__init__(hidden, options, ropes)
        self.projection = weight(positions, options["rank"])

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = turn(q, self.rope), turn(k, self.rope)
        rows = []
        for t in range(len(q)):
            table = self.projection[: t + 1]
            keys, values = (torch.einsum("sr,shd->hrd", table, part[: t + 1]) for part in (k, v))
            scores = torch.einsum("hd,hrd->hr", q[t], keys) * self.dim**-0.5
            rows.append(torch.einsum("hr,hrd->hd", scores.softmax(-1), values))
        return torch.stack(rows)


class GatedDelta(nn.Module):
    """The state as a matrix that each token multiplies by alpha (I - beta k k^T) before it adds beta k v^T."""

    def __init__(self, hidden: int, options: dict[str, Any]) -> None:
        super().__init__()
        self.k_heads, self.v_heads = options["num_k_heads"], options["num_v_heads"]
        self.k_dim, self.v_dim = options["head_k_dim"], options["head_v_dim"]
        self.widths = [self.k_heads * self.k_dim] * 2 + [self.v_heads * self.v_dim] * 2 + [self.v_heads] * 2
        self.in_proj = linear(sum(self.widths), hidden)
        self.conv = Conv(sum(self.widths[:3]), options["conv_width"], bias=False)
        self.A_log, self.dt_bias = weight(self.v_heads), weight(self.v_heads)
        self.norm = Norm(self.v_dim)
        self.out_proj = linear(hidden, self.v_heads * self.v_dim)

    def forward(self, x: Tensor) -> Tensor:
        *qkv, z, b, a = self.in_proj(x).split(self.widths, dim=1)
        q, k, v = self.conv(torch.cat(qkv, dim=1)).split(self.widths[:3], dim=1)
        repeats = self.v_heads // self.k_heads
        q, k = (part.unflatten(1, (self.k_heads, -1)).repeat_interleave(repeats, dim=1) for part in (q, k))
        q, k = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
        v, z = (part.unflatten(1, (self.v_heads, -1)) for part in (v, z))
        alpha = torch.exp(-self.A_log.exp() * F.softplus(a + self.dt_bias))[..., None, None]
        beta = b.sigmoid()[..., None, None]
        state, rows = x.new_zeros(self.v_heads, self.k_dim, self.v_dim), []
        for t in range(len(x)):
            column = k[t][:, :, None]
            forget = torch.eye(self.k_dim, dtype=x.dtype) - beta[t] * column @ column.mT
            state = alpha[t] * forget @ state + beta[t] * column @ v[t][:, None, :]
            rows.append((q[t][:, None, :] @ state)[:, 0] * self.k_dim**-0.5)
        y = self.norm(torch.stack(rows)) * F.silu(z)
        return self.out_proj(y.flatten(1))


def decay_between(rate: Tensor) -> Tensor:
    """exp of the sum of the rates at s + 1 .. t, for `rate` `[T, ...]`: `[t, s, ...]`, zero for s > t."""
    total = rate.double().cumsum(0)
    between = total[:, None] - total[None]
    later = torch.ones(len(rate), len(rate), dtype=torch.bool).triu(1)
    return between.masked_fill(later.reshape(later.shape + (1,) * (rate.ndim - 1)), -torch.inf).exp().to(rate.dtype)


class Mamba1(nn.Module):
    def __init__(self, hidden: int, options: dict[str, Any]) -> None:
        super().__init__()
        inner, self.states, self.rank = options["inner"], options["d_state"], options["dt_rank"]
        self.in_proj = linear(2 * inner, hidden)
        self.conv = Conv(inner, options["conv_width"], options.get("conv_bias", True))
        self.x_proj = linear(self.rank + 2 * self.states, inner)
        self.dt_proj = linear(inner, self.rank)
        self.A_log, self.D, self.dt_bias = weight(inner, self.states), weight(inner), weight(inner)
        self.out_proj = linear(hidden, inner)

    def forward(self, x: Tensor) -> Tensor:
        u, z = self.in_proj(x).chunk(2, dim=1)
        u = self.conv(u)
        dt, B, C = self.x_proj(u).split([self.rank, self.states, self.states], dim=1)
        dt = F.softplus(self.dt_proj(dt) + self.dt_bias)
        decay = decay_between(-dt[..., None] * self.A_log.exp())  # [t, s, inner, states]
        y = torch.einsum("tn,tsin,sn,si->ti", C, decay, B, dt * u) + self.D * u
        return self.out_proj(y * F.silu(z))


class Mamba2(nn.Module):
    def __init__(self, hidden: int, options: dict[str, Any]) -> None:
        super().__init__()
        self.heads, self.groups = options["num_heads"], options["n_groups"]
        inner, states = self.heads * options["head_dim"], self.groups * options["d_state"]
        self.widths = [inner, inner, states, states, self.heads]
        self.in_proj = linear(sum(self.widths), hidden)
        self.conv = Conv(inner + 2 * states, options["conv_width"], options.get("conv_bias", True))
        self.A_log, self.D, self.dt_bias = weight(self.heads), weight(self.heads), weight(self.heads)
        self.norm = Norm(inner)
        self.out_proj = linear(hidden, inner)

    def forward(self, x: Tensor) -> Tensor:
        z, *xBC, dt = self.in_proj(x).split(self.widths, dim=1)
        u, B, C = self.conv(torch.cat(xBC, dim=1)).split(self.widths[1:4], dim=1)
        u = u.unflatten(1, (self.heads, -1))
        repeats = self.heads // self.groups
        B, C = (part.unflatten(1, (self.groups, -1)).repeat_interleave(repeats, dim=1) for part in (B, C))
        dt = F.softplus(dt + self.dt_bias)
        decay = decay_between(-dt * self.A_log.exp())  # [t, s, heads]
        mixing = torch.einsum("thn,shn,tsh,sh->tsh", C, B, decay, dt)
        y = torch.einsum("tsh,shp->thp", mixing, u) + self.D[:, None] * u
        return self.out_proj(self.norm(y.flatten(1) * F.silu(z)))


class Mlp(nn.Module):
    def __init__(self, hidden: int, options: dict[str, Any]) -> None:
        super().__init__()
        self.gate_up, self.down = linear(2 * options["intermediate"], hidden), linear(hidden, options["intermediate"])
        self.act = {"silu": F.silu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}[
            options.get("activation", "silu")
        ]

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self.act(gate) * up)


class Experts(nn.Module):
    def __init__(self, hidden: int, options: dict[str, Any]) -> None:
        super().__init__()
        self.gate_up = weight(options["num_experts"], 2 * options["intermediate"], hidden)
        self.down = weight(options["num_experts"], hidden, options["intermediate"])


class Moe(nn.Module):
    """Every expert for every token, weighted by zero where it is not chosen."""

    def __init__(self, hidden: int, options: dict[str, Any]) -> None:
        super().__init__()
        self.options = options
        self.router = linear(options["num_experts"], hidden)
        self.experts = Experts(hidden, options)
        if options.get("shared_intermediate"):
            self.shared = Mlp(hidden, {"intermediate": options["shared_intermediate"]})
            self.shared_gate = linear(1, hidden)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.router(x)
        kept = logits >= logits.sort(-1, descending=True).values[:, [self.options["top_k"] - 1]]
        router = self.options.get("router", {})
        weights = logits.softmax(-1) * kept
        if router.get("renormalize") or router.get("scoring") == "softmax_topk":
            weights = weights / weights.sum(-1, keepdim=True)
        gate, up = torch.einsum("th,eih->tei", x, self.experts.gate_up).chunk(2, dim=-1)
        y = torch.einsum("tei,ehi->teh", F.silu(gate) * up, self.experts.down)
        y = torch.einsum("te,teh->th", weights.to(x.dtype), y)
        return y + self.shared_gate(x).sigmoid() * self.shared(x) if hasattr(self, "shared") else y
