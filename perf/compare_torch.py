"""Decode of the same shapes by PyTorch and by this engine, side by side in one run: bf16, random weights, greedy.

python -m perf.compare_torch [--model 8b] [--out FILE] [--minutes 3] [--dry-run]

Peers, as far as they are installed: transformers as it comes (eager), transformers with a static cache under
``torch.compile(mode="reduce-overhead")``, and the decoder written out in PyTorch (cuBLAS products, scaled dot product
attention over a static cache) eager, as one CUDA graph, and compiled. Ours: bf16, fused and captured. One sequence,
times from token to token, each read by the host while the next step runs, medians. What is missing is named.
``--dry-run`` runs tiny shapes on the CPU and on the PTX executor, without CUDA graphs: it shows that the script works.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from numba_engine.errors import NumbaEngineError
from numba_engine.formats import BF16
from numba_engine.model.config import ModelConfig
from perf.bench_decode import Workload, step_seconds
from perf.gpu_time import Deadline, Report, plain_read_gbps
from perf.random_model import CONFIGS, make_backend, random_model

Step = Callable[[], None]
"""One token more; the host has the one before."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("8b", "1b"), action="append", help="Llama shapes; default both.")
    parser.add_argument("--context", type=int, default=128, help="Tokens the first timed step sees.")
    parser.add_argument("--out", type=Path, help="Write the results here as JSON, after each one.")
    parser.add_argument("--minutes", type=float, default=60, help="Start nothing after this long.")
    parser.add_argument("--dry-run", action="store_true", help="Tiny shapes on the CPU and the PTX executor.")
    options = parser.parse_args()
    deadline, steps = Deadline(60 * options.minutes), 2 if options.dry_run else 50
    report = Report(options.out, dry_run=options.dry_run, missing=_missing(options.dry_run))
    for missing in report.report["missing"]:
        print(f"missing: {missing}")
    for model in ("tiny",) if options.dry_run else options.model or ("8b", "1b"):
        context = 20 if options.dry_run else options.context
        runs = [("numba_engine bf16", lambda m=model, c=context: _ours(m, c, steps, options.dry_run))]
        if importlib.util.find_spec("torch"):
            runs += [
                (name, lambda make=make, m=model, c=context: _peer(make, CONFIGS[m], c, steps, options.dry_run))
                for name, make in _peers(options.dry_run)
            ]
        for name, run in runs:
            if not deadline.allows(f"{model} {name}"):
                continue
            result: dict[str, Any] = {"model": model, "context": context, "engine": name}
            try:
                seconds = run()
                result |= {"step_ms": seconds * 1e3, "tokens_per_s": 1 / seconds}
            except (RuntimeError, ImportError, AttributeError, TypeError, ValueError, NumbaEngineError) as error:
                # A peer that does not run here must not keep the others from running.
                result["failed"] = f"{type(error).__name__}: {str(error).strip()[:300]}"
            report.add(result)
            rate = "ran" if options.dry_run else f"{result.get('tokens_per_s', 0):8.1f} tok/s"
            print(f"{model:5} {name:44} {result.get('failed', rate)}")
            _free(options.dry_run)
    if deadline.left_out:
        print(f"no time left for {len(deadline.left_out)}: {', '.join(deadline.left_out)}")


def _missing(dry_run: bool) -> list[str]:
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if "torch" not in missing and not dry_run:
        import torch

        if not torch.cuda.is_available():
            missing.append("torch with CUDA")
    return missing


def _ours(model: str, context: int, steps: int, dry_run: bool) -> float:
    backend = make_backend(dry_run)
    read_gbps = plain_read_gbps(backend, 1 << 20 if dry_run else 1 << 30)
    weights = random_model(backend, CONFIGS[model], BF16)
    seconds = step_seconds(backend, CONFIGS[model], weights, Workload(1, context, steps), fusion=True, graph=True)
    if not dry_run:
        print(f"plain read {read_gbps:.0f} GB/s")
    return seconds


def _peer(
    make: Callable[[ModelConfig, int, str], Step], config: ModelConfig, context: int, steps: int, dry_run: bool
) -> float:
    import torch

    times = []
    with torch.inference_mode():
        step = make(config, context + steps + 16, "cpu" if dry_run else "cuda")
        for _ in range(1 if dry_run else 5):  # compiles, captures, warms up
            step()
        for _ in range(steps):
            start = time.perf_counter()
            step()
            times.append(time.perf_counter() - start)
    return median(times)


def _free(dry_run: bool) -> None:
    gc.collect()
    if not dry_run and importlib.util.find_spec("torch"):
        import torch

        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _peers(dry_run: bool) -> Iterator[tuple[str, Callable[[ModelConfig, int, str], Step]]]:
    if not dry_run:
        yield "torch, written out, CUDA graph", _torch_graph
    yield "torch, written out, torch.compile", _torch_compiled
    yield "torch, written out, eager", _torch_eager
    if importlib.util.find_spec("transformers"):
        yield "transformers eager", _transformers_eager
        yield "transformers static cache, torch.compile", _transformers_compiled


# ---- the decoder written out in PyTorch ------------------------------------------------------------------------------


class OneStepBehind:
    """Reads tokens on the host while the next step runs, as our engine does: a peer must not wait where we do not."""

    def __init__(self, device: str) -> None:
        import torch

        self._torch, self._on_gpu = torch, device == "cuda"
        self._waiting: tuple[Any, Any] | None = None

    def read(self, token: Any) -> None:
        """Start on this step's token; have the last one's."""
        if not self._on_gpu:
            token.item()
            return
        host = self._torch.empty(token.shape, dtype=token.dtype, pin_memory=True)
        host.copy_(token, non_blocking=True)
        event = self._torch.cuda.Event()
        event.record()
        if self._waiting is not None:
            last_host, last_event = self._waiting
            last_event.synchronize()
            last_host.item()
        self._waiting = host, event


class TorchDecoder:
    """A Llama decoder, bf16, one token at a time over a static cache; everything a step changes is a tensor."""

    def __init__(self, config: ModelConfig, max_len: int, device: str) -> None:
        import torch

        self.c, self.max_len, self.torch = config, max_len, torch
        options = {"device": device, "dtype": torch.bfloat16}

        def matrix(rows: int, columns: int) -> Any:
            return torch.randn(rows, columns, **options) * 0.02

        c, layer, shape = config, config.layers[0], config.layers[0].attention
        q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.layers = [
            (
                matrix(q_size + 2 * kv_size, c.hidden_size),
                matrix(c.hidden_size, q_size),
                matrix(2 * layer.intermediate_size, c.hidden_size),
                matrix(c.hidden_size, layer.intermediate_size),
                torch.zeros(1, shape.num_kv_heads, max_len, shape.head_dim, **options),
                torch.zeros(1, shape.num_kv_heads, max_len, shape.head_dim, **options),
            )
            for _ in range(c.num_layers)
        ]
        self.norm = torch.ones(c.hidden_size, **options)
        self.head = matrix(c.vocab_size, c.hidden_size)
        assert layer.rope is not None
        frequencies = layer.rope.theta ** -(torch.arange(0, shape.head_dim, 2, device=device) / shape.head_dim)
        angles = torch.outer(torch.arange(max_len, device=device), frequencies).repeat(1, 2)
        self.cos, self.sin = angles.cos().bfloat16(), angles.sin().bfloat16()
        self.places = torch.arange(max_len, device=device)
        self.token = torch.zeros(1, dtype=torch.long, device=device)
        self.position = torch.full((1,), max(max_len - 66, 0), dtype=torch.long, device=device)

    def step(self) -> None:
        """Reads and writes ``token`` and ``position``."""
        functional, c = self.torch.nn.functional, self.c
        x = self.head[self.token]
        cos, sin = self.cos[self.position], self.sin[self.position]
        mask = (self.places <= self.position)[None, None, None]
        shape = c.layers[0].attention
        sizes = [heads * shape.head_dim for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)]
        for qkv_proj, o_proj, gate_up_proj, down_proj, keys, values in self.layers:
            normed = functional.rms_norm(x, (c.hidden_size,), self.norm, 1e-5)
            parts = functional.linear(normed, qkv_proj).split(sizes, dim=-1)
            q, k, v = (part.view(1, 1, -1, shape.head_dim).transpose(1, 2) for part in parts)
            keys.index_copy_(2, self.position, _rotated(k, cos, sin))
            values.index_copy_(2, self.position, v)
            out = functional.scaled_dot_product_attention(
                _rotated(q, cos, sin), keys, values, attn_mask=mask, enable_gqa=True
            )
            x = x + functional.linear(out.transpose(1, 2).reshape(1, -1), o_proj)
            normed = functional.rms_norm(x, (c.hidden_size,), self.norm, 1e-5)
            gate, up = functional.linear(normed, gate_up_proj).chunk(2, dim=-1)
            x = x + functional.linear(functional.silu(gate) * up, down_proj)
        logits = functional.linear(functional.rms_norm(x, (c.hidden_size,), self.norm, 1e-5), self.head)
        self.token.copy_(logits.argmax(dim=-1))
        self.position.add_(1).clamp_(max=self.max_len - 1)


def _rotated(x: Any, cos: Any, sin: Any) -> Any:
    import torch

    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


def _torch_eager(config: ModelConfig, max_len: int, device: str) -> Step:
    decoder, host = TorchDecoder(config, max_len, device), OneStepBehind(device)

    def step() -> None:
        decoder.step()
        host.read(decoder.token)

    return step


def _torch_graph(config: ModelConfig, max_len: int, device: str) -> Step:
    import torch

    decoder, host = TorchDecoder(config, max_len, device), OneStepBehind(device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # cuBLAS takes its workspace before the capture
        decoder.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decoder.step()

    def step() -> None:
        graph.replay()
        host.read(decoder.token)

    return step


def _torch_compiled(config: ModelConfig, max_len: int, device: str) -> Step:
    import torch

    decoder, host = TorchDecoder(config, max_len, device), OneStepBehind(device)
    # On a CPU only that it traces is of interest: without a C++ compiler inductor cannot run at all.
    compiled = torch.compile(decoder.step, **_compile_options(device))

    def step() -> None:
        compiled()
        host.read(decoder.token)

    return step


def _compile_options(device: str) -> dict[str, Any]:
    return {"mode": "reduce-overhead"} if device == "cuda" else {"backend": "eager"}


# ---- transformers ----------------------------------------------------------------------------------------------------


def _llama(config: ModelConfig, max_len: int, device: str) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    layer = config.layers[0]
    shape = LlamaConfig(
        hidden_size=config.hidden_size,
        intermediate_size=layer.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=layer.attention.num_heads,
        num_key_value_heads=layer.attention.num_kv_heads,
        head_dim=layer.attention.head_dim,
        vocab_size=config.vocab_size,
        max_position_embeddings=max_len,
        tie_word_embeddings=config.tie_word_embeddings,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return LlamaForCausalLM(shape).eval()
    finally:
        torch.set_default_dtype(before)


def _transformers_eager(config: ModelConfig, max_len: int, device: str) -> Step:
    import torch

    model = _llama(config, max_len, device)
    prompt = torch.zeros(1, max(max_len - 66, 1), dtype=torch.long, device=device)
    output = model(prompt, use_cache=True)
    state, host = {"token": output.logits[:, -1:].argmax(-1), "cache": output.past_key_values}, OneStepBehind(device)

    def step() -> None:
        output = model(state["token"], past_key_values=state["cache"], use_cache=True)
        state["token"] = output.logits[:, -1:].argmax(-1)
        host.read(state["token"])

    return step


def _transformers_compiled(config: ModelConfig, max_len: int, device: str) -> Step:
    import torch
    from transformers import StaticCache

    model = _llama(config, max_len, device)
    cache = StaticCache(config=model.config, max_cache_len=max_len)
    length = max(max_len - 66, 1)
    prompt = torch.zeros(1, length, dtype=torch.long, device=device)
    positions = torch.arange(length, device=device)
    token = model(prompt, past_key_values=cache, cache_position=positions).logits[:, -1:].argmax(-1)
    position = torch.full((1,), length, dtype=torch.long, device=device)
    forward = torch.compile(model.forward, **_compile_options(device))
    state, host = {"token": token}, OneStepBehind(device)

    def step() -> None:
        logits = forward(state["token"].clone(), past_key_values=cache, cache_position=position).logits
        state["token"] = logits[:, -1:].argmax(-1).clone()
        host.read(state["token"])
        position.add_(1).clamp_(max=max_len - 1)

    return step


if __name__ == "__main__":
    main()
