"""The walk as something to read on a terminal. Sizes are decimal: 1 MB is a million bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import MappingProxyType

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.constrain import Constrain
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from numba_engine.backends.base import OPS
from numba_engine.profiling.explain.answers import answers
from numba_engine.profiling.explain.close_up import NamedShape
from numba_engine.profiling.explain.stages import Stage
from numba_engine.profiling.explain.walk import Cost, Phase, Token, Walk
from numba_engine.profiling.report import OpProfile
from numba_engine.profiling.tables import format_bytes, format_count, format_plural, format_time, plain_table

WIDTH = 110
_MAX_TOKENS_SHOWN = 24
_CANDIDATES_SHOWN = 3
_BLANK = Text()
_SIMULATED = (
    "This GPU is simulated: its times are predictions for one by its datasheet, a launch's cost and then the roofline,"
    " and measure nothing."
)

_WHAT_MATRICES_DO = MappingProxyType(
    {
        "qkv_proj": "q, k and v by one matrix",
        "o_proj": "the heads mixed, and added to the residual",
        "gate_up_proj": "gate and up by one matrix",
        "down_proj": "back to the hidden size, and added to the residual",
        "lm_head": "one dot product for each token of the vocabulary",
        "embed_tokens": "one dot product for each token of the vocabulary",
    }
)


def essay(walk: Walk) -> RenderableType:
    """All of it, in the order in which it happens."""
    parts = (
        _title(walk),
        _section(1, "prompt → token ids", _prompt(walk)),
        _section(2, "prefill, then decode", _prefill_and_decode(walk)),
        _section(3, "token id → a row of the embedding", _embedding(walk)),
        _section(4, f"through {format_plural(walk.model.num_layers, 'layer')}", _layers(walk)),
        _section(5, "final norm and LM head → logits", _head(walk)),
        _section(6, "logits → one token", _choice(walk)),
        _section(7, "token → text", _text(walk)),
        _section(8, "the time budget", _budget(walk)),
        _section(9, "five questions, answered by this run", _questions(walk)),
        _BLANK,
        _basis(walk),
    )
    return Constrain(Group(*parts), WIDTH)


def _section(number: int, title: str, parts: Iterable[RenderableType]) -> RenderableType:
    heading = Rule(Text(f"{number}  {title}", style="bold"), align="left", style="dim")
    return Group(_BLANK, heading, *(piece for part in parts for piece in (_BLANK, part)))


def _title(walk: Walk) -> RenderableType:
    m = walk.model
    return _paragraph(
        f"One token of {m.name}",
        f" ({m.architecture}, {format_count(m.num_parameters)} parameters, {format_bytes(m.weight_bytes)} as"
        f" {', '.join(m.weight_formats)}) on {m.backend}: {m.device_name}; {m.activation_dtype} activations,"
        f" {m.kv_cache_dtype} KV cache." + (f" {_SIMULATED}" if walk.is_simulated else ""),
    )


# ---- sections ------------------------------------------------------------------------------------------------------


def _prompt(walk: Walk) -> Iterable[RenderableType]:
    tokens = walk.prompt_tokens
    yield _paragraph(
        f"The model computes with numbers, not with text. The tokenizer cut {len(walk.prompt):,} characters into"
        f" {format_plural(len(tokens), 'token')}; each has an id below {walk.model.vocab_size:,}."
    )
    shown = (Text.assemble((f"{token.token_id} ", "dim"), repr(token.text)) for token in tokens[: _shown(tokens)])
    yield Columns(shown, padding=(0, 3))
    if len(tokens) > _shown(tokens):
        yield _paragraph(f"… and {len(tokens) - _shown(tokens):,} more, the last {_quoted(tokens[-1])}.")


def _prefill_and_decode(walk: Walk) -> Iterable[RenderableType]:
    prefill, decode = walk.prefill, walk.decode
    many = "all at once" if prefill.num_steps == 1 else f"in {prefill.num_steps} steps"
    yield _paragraph(
        f"The prompt is known from the start, so its {format_plural(prefill.num_tokens, 'token')} went through {many}"
        f" (prefill). Their keys and values stay in the KV cache, and the last one's logits gave"
        f" {_quoted(walk.first_token)}. From there on every token needs the one before, and goes through alone"
        f" (decode). The rest of this text follows the step that takes in {_quoted(walk.first_token)} and makes the"
        f" token after it."
    )
    table = plain_table("")
    table.add_column("")
    table.add_column("prefill", justify="right")
    table.add_column("decode", justify="right")
    for name, value in _COST_ROWS:
        table.add_row(name, value(prefill), value(decode))
    yield table


_COST_ROWS: tuple[tuple[str, Callable[[Cost], str]], ...] = (
    ("tokens in", lambda c: f"{c.num_tokens:,}"),
    ("tokens in the KV cache afterwards", lambda c: f"{c.context_len:,}"),
    ("time", lambda c: format_time(c.time_s)),
    ("time a token", lambda c: format_time(c.time_per_token_s)),
    ("weights read", lambda c: format_bytes(c.weight_bytes)),
    ("weights read a token", lambda c: format_bytes(round(c.weight_bytes_per_token))),
    ("keys and values read and written", lambda c: format_bytes(c.kv_bytes)),
    ("FLOPs", lambda c: format_count(c.flops)),
    ("FLOPs for each byte from memory", lambda c: f"{c.intensity:,.1f}"),
    ("GB/s", lambda c: f"{c.gbps:.1f}"),
    ("GFLOP/s", lambda c: f"{c.gflops:.1f}"),
)


def _embedding(walk: Walk) -> Iterable[RenderableType]:
    row, table = walk.embedding, walk.embedding.table
    yield _paragraph(
        f"Token {row.token.token_id:,}, {_quoted(row.token)}, is row {row.token.token_id:,} of the embedding table"
        f" {_dims(table.shape)} ({', '.join(table.formats)}, {format_bytes(table.nbytes)}). {row.row_bytes:,} bytes of"
        f" it are read and become {row.num_values:,} numbers, the residual, which every layer adds to. The other"
        f" {table.shape[0] - 1:,} rows are not touched. Time: {format_time(row.phase.one.time_s)}."
    )


def _layers(walk: Walk) -> Iterable[RenderableType]:
    m = walk.model
    group = m.num_heads // m.num_kv_heads
    heads = f"{format_plural(m.num_heads, 'head')} of {m.head_dim}"
    sharing = f", {group} to each of {format_plural(m.num_kv_heads, 'KV head')}" if group > 1 else ""
    yield _paragraph(
        f"Each layer does the same on its own weights: attention ({heads}{sharing}), then an MLP"
        f" {m.hidden_size:,} → {m.intermediate_size:,} → {m.hidden_size:,}. Shapes, bytes and FLOPs are those of the"
        f" first layer, the time is the mean layer's; then all {format_plural(m.num_layers, 'layer')} together, and"
        f" their share of the token's time."
    )
    if near_bytes := sum(level.nbytes for level in walk.caches):
        way = ", ".join(f"{level.name} ({format_bytes(level.nbytes)})" for level in reversed(walk.caches))
        kept = "too small to keep" if near_bytes < m.weight_bytes else "large enough to keep"
        yield _paragraph(
            f"The weights come from memory through {way} into registers, where the units take them. Those caches are"
            f" {kept} all {format_bytes(m.weight_bytes)} until the next token wants them."
        )
    yield _phase_list(walk.layer_phases)
    yield _phase_table(walk.layer_phases, walk, total=walk.layers)


def _head(walk: Walk) -> Iterable[RenderableType]:
    matrix = next(phase.matrix for phase in walk.head_phases if phase.matrix)
    tied = " The table is the embedding again (they are tied), this time all of it." if _is_tied(walk) else ""
    yield _paragraph(
        f"What the layers made of the residual meets the LM head {_dims(matrix.shape)}: one logit for each of"
        f" {walk.model.vocab_size:,} tokens, the larger the likelier.{tied}"
    )
    yield _phase_list((*walk.head_phases, walk.sample))
    yield _phase_table((*walk.head_phases, walk.sample), walk)


def _choice(walk: Walk) -> Iterable[RenderableType]:
    choice = walk.choice
    yield _paragraph(
        "Each row is what a stage left, most likely first. “Left” counts tokens; “mass” is the probability that they"
        " had before any was dropped."
    )
    yield _stage_table(choice.stages)
    if choice.greedy:
        yield _paragraph(f"At temperature 0 there is no draw: {_quoted(walk.token)} has the largest logit.")
    else:
        yield _paragraph(
            f"The draw is a race: token i gets a random u in (0, 1), by Philox from the seed {choice.seed}, from how"
            f" many tokens came before ({choice.output_index}) and from i alone. The largest p / -log u wins, so that"
            f" each wins with its probability p whatever else is in the batch."
        )
        table = plain_table("")
        table.add_column("token")
        for header in ("id", "p", "u", "p / -log u"):
            table.add_column(header, justify="right")
        for runner in choice.race:
            figures = (
                f"{runner.token_id:,}",
                f"{runner.probability:.2%}",
                f"{runner.uniform:.6f}",
                f"{runner.score:.4f}",
            )
            table.add_row(Text(repr(runner.text)), *figures)
        yield table
    if choice.agrees:
        yield _paragraph(
            f"Computed here by sorting, in float64, from the step's logits. The engine's sampler, which never sorts,"
            f" chose token {choice.engine_token_id:,} too: {_quoted(walk.token)}."
        )
    else:
        warning = (
            f"The engine's sampler chose token {choice.engine_token_id:,}, {_quoted(walk.token)}, and not"
            f" {choice.token_id:,}. This is a bug: please report it with the model, the prompt and the seed."
        )
        yield Text(warning, style="bold red")


def _text(walk: Walk) -> Iterable[RenderableType]:
    yield _paragraph(
        f"Token {walk.token.token_id:,} stands for {walk.token.text!r}. A token may end inside a character, whose bytes"
        f" are then held back until the next ones complete it, or become U+FFFD if none follow. Both tokens together,"
        f" after the prompt: {walk.text!r}."
    )


def _budget(walk: Walk) -> Iterable[RenderableType]:
    budget, decode = walk.budget, walk.decode
    if walk.is_simulated:
        yield _paragraph(f"{_SIMULATED} numba-engine roofline says what a GPU's memory allows.")
        return
    grid = Table.grid(padding=(0, 2))
    grid.add_column()
    grid.add_column(justify="right")
    grid.add_column(style="dim")
    split = f"weights {format_bytes(decode.weight_bytes)}, keys and values {format_bytes(decode.kv_bytes)}"
    grid.add_row("bytes from memory", format_bytes(budget.memory_bytes), f"by formula: {split}")
    if budget.read_bandwidth_gbps:
        grid.add_row("read bandwidth", f"{budget.read_bandwidth_gbps:.1f} GB/s", "measured in this run, same threads")
        limit = f"{1 / budget.floor_s:,.1f} tok/s if every byte is read once at that bandwidth"
        grid.add_row("floor", format_time(budget.floor_s), limit)
    grid.add_row("achieved", format_time(budget.time_s), f"{1 / budget.time_s:,.1f} tok/s, this step")
    if budget.floor_s:
        grid.add_row("share of the floor", f"{budget.share_of_floor:.0%}", "100 % is the limit of memory")
    unwatched = f"{1 / budget.unwatched_time_s:,.1f} tok/s, the fastest of a row of tokens with no profile on"
    grid.add_row("unwatched", format_time(budget.unwatched_time_s), unwatched)
    grid.add_row("host", format_time(decode.host_time_s), "of the achieved time: scheduling, batch building, text")
    grid.add_row(
        "arithmetic alone",
        format_time(budget.arithmetic_s),
        f"{format_count(decode.flops)} FLOPs at the {budget.best_gflops:.1f} GFLOP/s seen in this run",
    )
    grid.add_row("idle arithmetic", f"≥ {budget.idle_share:.0%}", "of the achieved time")
    yield grid
    if budget.share_of_floor > 1:
        yield _paragraph("Faster than its memory: enough of these weights stay in the caches from token to token.")


def _questions(walk: Walk) -> Iterable[RenderableType]:
    for number, answer in enumerate(answers(walk), 1):
        question = Text(f"{number}. {answer.question}", style="bold")
        yield Group(question, Text.assemble((f"{answer.short} ", "green"), answer.text))


def _basis(walk: Walk) -> Text:
    runs = "of one run" if walk.repetitions == 1 else f"of the fastest of {walk.repetitions} runs"
    times = "predicted" if walk.is_simulated else f"measured, {runs}, the cost of looking subtracted"
    return Text(f"Times are {times}; bytes and FLOPs are by formula from the shapes.", style="dim")


# ---- parts of the above --------------------------------------------------------------------------------------------


def _phase_list(phases: Sequence[Phase]) -> RenderableType:
    """What each phase does, and its shapes."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column()
    for phase in phases:
        matrix = phase.matrix
        weights = f" × {_dims(matrix.shape)} {'+'.join(matrix.formats)}" if matrix else ""
        shapes = f"{_named(phase.inputs)}{weights} → {_named(phase.outputs)}"
        grid.add_row(phase.name, Text.assemble(shapes, (f"  {_what_it_does(phase.name)}", "dim")))
    return grid


def _what_it_does(name: str) -> str:
    """Of an op, or of one by its matrix (``linear_add o_proj``)."""
    op, _, matrix = name.partition(" ")
    return _WHAT_MATRICES_DO[matrix] if matrix else OPS[op].summary


def _phase_table(phases: Sequence[Phase], walk: Walk, total: OpProfile | None = None) -> Table:
    """``total``: of all layers, which then have columns of their own."""
    table = plain_table("", show_footer=total is not None, footer_style="bold")
    table.add_column("phase", no_wrap=True, footer="all")
    for header in ("bytes", "FLOPs", "time"):
        table.add_column(header, justify="right", no_wrap=True)
    if total is not None:
        layers = walk.model.num_layers
        table.add_column(f"bytes × {layers}", justify="right", no_wrap=True, footer=format_bytes(total.total_bytes))
        table.add_column(f"time × {layers}", justify="right", no_wrap=True, footer=format_time(total.time_s))
    table.add_column("GB/s", justify="right", no_wrap=True, footer=f"{total.gbps:.1f}" if total else "")
    table.add_column("share", justify="right", no_wrap=True, footer=_share(total, walk) if total else "")
    for phase in phases:
        cells = [phase.name, *_figures(phase.one)]
        if total is not None:
            cells += [format_bytes(phase.total.total_bytes), format_time(phase.total.time_s)]
        table.add_row(*cells, f"{phase.total.gbps:.1f}", _share(phase.total, walk))
    return table


def _figures(op: OpProfile) -> tuple[str, str, str]:
    return format_bytes(op.total_bytes), format_count(op.flops), format_time(op.time_s)


def _stage_table(stages: Sequence[Stage]) -> Table:
    table = plain_table("")
    table.add_column("stage", no_wrap=True)
    table.add_column("setting", no_wrap=True)
    table.add_column("left", justify="right", no_wrap=True)
    table.add_column("mass", justify="right", no_wrap=True)
    table.add_column("most likely: probability (logit)")
    for stage in stages:
        best = "  ".join(
            f"{_named_by(c.token_id, c.text)} {c.probability:.1%} ({c.logit:.2f})"
            for c in stage.top[:_CANDIDATES_SHOWN]
        )
        cells = (stage.name, stage.setting, f"{stage.num_left:,}", f"{stage.mass:.1%}", best)
        table.add_row(*(Text(cell) for cell in cells))
    return table


def _is_tied(walk: Walk) -> bool:
    return any(
        phase.matrix is not None and phase.matrix.name == walk.embedding.table.name for phase in walk.head_phases
    )


def _share(op: OpProfile, walk: Walk) -> str:
    return f"{op.time_s / walk.decode.time_s:.1%}" if walk.decode.time_s else ""


def _named(end: NamedShape) -> str:
    return f"{end.name} {_dims(end.shape)}"


def _dims(shape: Sequence[int]) -> str:
    return f"[{', '.join(str(extent) for extent in shape)}]"


def _shown(tokens: Sequence[Token]) -> int:
    return len(tokens) if len(tokens) <= _MAX_TOKENS_SHOWN else _MAX_TOKENS_SHOWN - 2


def _quoted(token: Token) -> str:
    return _named_by(token.token_id, token.text)


def _named_by(token_id: int, text: str) -> str:
    """Part of a character, or no text at all, does not tell a token from others."""
    return repr(text) if text and "\ufffd" not in text else f"{text!r} (#{token_id})"


def _paragraph(*parts: str) -> Text:
    """The first of several parts is bold. Never markup: a token may be any text."""
    return Text(parts[0]) if len(parts) == 1 else Text.assemble((parts[0], "bold"), *parts[1:])
