"""A memory plan as one page of text."""

from __future__ import annotations

from hybridtrt.converters.plan import RUNTIME_BYTES, TOKENS_PER_BLOCK, Plan, RankPlan


def render_plan(plan: Plan) -> str:
    """A line of figures for each split of the GPUs, in GB (10^9 bytes) of its fullest rank."""
    options = plan.options
    groups = list(dict.fromkeys(group for rank in plan.ranks for group in rank.kv))
    head = ("TP", "EP", "PP", "weights", *(f"KV {group}" for group in groups), "states", "activations", "buffers")
    table = [(*head, "total", "fits", "sequences"), *(_line(rank, groups) for rank in plan.ranks)]
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    rows = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in table]
    lines = [
        f"{plan.architecture}: {plan.parameters:,} parameters, {plan.dtype}",
        f"GPUs: {options.gpus} of {options.gpu_memory:g} GB; {options.concurrency} sequences of {options.max_seq_len} "
        f"tokens, at most {options.max_num_tokens} tokens a step",
        "",
        "GB of the fullest rank:",
        *(rows if plan.ranks else ["no split is possible"]),
        "",
        f"total includes {RUNTIME_BYTES / 1e9:g} GB for the CUDA context and the libraries; `sequences` is how many of "
        "this length fit",
        "EP of the TP ranks divide the experts, each expert is divided among TP / EP of them",
        f"KV is kept in {options.kv_cache_dtype or plan.dtype}, states in {options.state_dtype}; there are as many "
        "snapshots of states as sequences",
        *(
            f"KV {group}: {pages:,} pages of {TOKENS_PER_BLOCK} tokens a sequence at most"
            for group, pages in plan.pages.items()
        ),
    ]
    reasons: dict[str, list[str]] = {}
    for split, reason in plan.impossible.items():
        reasons.setdefault(reason, []).append(split)
    lines += [f"not possible: {'; '.join(found)}: {reason}" for reason, found in reasons.items()]
    fitting = [rank for rank in plan.ranks if rank.fits]
    if fitting:
        best = max(fitting, key=lambda rank: rank.sequences)
        lines.append(f"most room: {best.split}, {best.sequences} sequences")
    elif plan.ranks:
        lines.append("nothing fits: more GPUs, fewer or shorter sequences, or a smaller dtype")
    return "\n".join(lines)


def _line(rank: RankPlan, groups: list[str]) -> tuple[str, ...]:
    parts = [rank.weights, *(rank.kv.get(group, 0) for group in groups), rank.states, rank.activations, rank.buffers]
    figures = tuple(f"{part / 1e9:.2f}" for part in [*parts, rank.total])
    sizes = (str(rank.split.tp), str(rank.split.ep), str(rank.split.pp))
    return (*sizes, *figures, "yes" if rank.fits else "no", str(rank.sequences))
