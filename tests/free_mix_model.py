"""`hybridtrt_free_mix` by plain definitions, written apart from the engine and registered with transformers.

Whatever has a closed form over the whole sequence takes that form here, where the engine runs a recurrence: every
result is then a sum over earlier tokens, without a state, chunks or caches. Positions are 0, 1, 2, ...
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput


class FreeMixConfig(transformers.PreTrainedConfig):
    model_type = "hybridtrt_free_mix"


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
    angle = torch.arange(len(x), dtype=torch.float64)[:, None] * speed
    z = torch.complex(x[..., :half].double(), x[..., half : 2 * half].double()) * torch.polar(
        torch.ones_like(angle), angle
    ).unsqueeze(1)
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
        weights = logits.float().softmax(-1) * kept
        if router.get("renormalize") or router.get("scoring") == "softmax_topk":
            weights = weights / weights.sum(-1, keepdim=True)
        gate, up = torch.einsum("th,eih->tei", x, self.experts.gate_up).chunk(2, dim=-1)
        y = torch.einsum("tei,ehi->teh", F.silu(gate) * up, self.experts.down)
        y = torch.einsum("te,teh->th", weights.to(x.dtype), y)
        return y + self.shared_gate(x).sigmoid() * self.shared(x) if hasattr(self, "shared") else y


MIXERS: dict[str, Any] = {"gated_delta": GatedDelta, "mamba1": Mamba1, "mamba2": Mamba2}
HEADS: dict[str, Any] = {"attention": Attention, "length_routed": LengthRouted}
FFNS: dict[str, Any] = {"mlp": Mlp, "moe": Moe}


class Layer(nn.Module):
    """Branches by their kind; the first of a block holds the block's norm. From `[1, T, hidden]` to the same."""

    def __init__(self, config: FreeMixConfig, entry: dict[str, Any]) -> None:
        super().__init__()
        self.blocks: list[list[str]] = []
        ropes = getattr(config, "ropes", [])
        for options in (entry.get("mixer"), entry.get("ffn")):
            if options is None:
                continue
            kind = options["kind"]
            if kind in HEADS:
                branch = HEADS[kind](config.hidden_size, options, ropes)
            elif kind == "low_rank":
                branch = LowRank(config.hidden_size, options, ropes, config.max_position_embeddings)
            else:
                branch = (MIXERS | FFNS)[kind](config.hidden_size, options)
            self.add_module(kind, branch)
            if self.blocks and entry.get("parallel"):
                self.blocks[0].append(kind)
            else:
                self.blocks.append([kind])
                branch.pre_norm = Norm(config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        x = x.squeeze(0)
        for kinds in self.blocks:
            normed = self.get_submodule(kinds[0]).pre_norm(x)
            x = x + sum(self.get_submodule(kind)(normed) for kind in kinds)
        return x.unsqueeze(0)


def written_out(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The list of layers without groups and repeats."""
    return [
        layer
        for entry in entries
        for _ in range(entry.get("repeat", 1))
        for layer in (written_out(entry["layers"]) if "layers" in entry else [entry])
    ]


class FreeMixModel(transformers.PreTrainedModel):
    config_class = FreeMixConfig
    _tied_weights_keys = {"lm_head.weight": "embedding.weight"}  # noqa: RUF012

    def __init__(self, config: FreeMixConfig) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, entry) for entry in written_out(config.layers))
        self.final_norm = Norm(config.hidden_size)
        self.lm_head = linear(config.vocab_size, config.hidden_size)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> CausalLMOutput:
        rows = []
        for ids in input_ids.split(1):
            x = self.embedding(ids) * getattr(self.config, "embedding_multiplier", 1.0)
            for layer in self.layers:
                x = layer(x)
            rows.append(self.lm_head(self.final_norm(x)))
        return CausalLMOutput(logits=torch.cat(rows))


transformers.AutoConfig.register("hybridtrt_free_mix", FreeMixConfig)
transformers.AutoModelForCausalLM.register(FreeMixConfig, FreeMixModel)
