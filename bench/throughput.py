"""Tokens per second through client, broker and worker, over a bare llama.cpp loop.

Both sides decode the same greedy tokens of the same prompt on the same threads, alternating in
one run, each warmed up; the ratio is taken pair by pair and its median reported.

    .venv/bin/python bench/throughput.py [--rounds 7] [--tokens 96] [--json]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time
from pathlib import Path
from typing import Any

from llama_cpp import llama_cpp as ll
from texts import token_ids

from vram_conductor.client import Conductor
from vram_conductor.client.stage import Stage, StageDevice
from vram_conductor.protocol.catalogue import load_catalogue, model_path, packaged_catalogue
from vram_conductor.protocol.config import WorkerConfig, models_dir

N_CTX = 1024
PROMPT_TOKENS = 32
MODEL = "smollm2-135m"


class BareLoop:
    """The smallest loop that llama-cpp-python's low-level API allows: one batch, one sampler."""

    def __init__(self, path: Path, threads: int) -> None:
        # The callback object must outlive the calls; llama.cpp keeps only its address.
        self._quiet = ll.llama_log_callback(_say_nothing)
        ll.llama_log_set(self._quiet, ctypes.c_void_p(0))
        ll.llama_backend_init()
        params = ll.llama_model_default_params()
        params.load_mode = ll.LLAMA_LOAD_MODE_NONE
        self._model: Any = ll.llama_model_load_from_file(str(path).encode(), params)
        context = ll.llama_context_default_params()
        context.n_ctx, context.n_batch, context.n_ubatch = N_CTX, 64, 64
        context.n_threads = context.n_threads_batch = threads
        context.n_outputs_max = 1
        self._context: Any = ll.llama_init_from_model(self._model, context)
        self._memory: Any = ll.llama_get_memory(self._context)
        vocab: Any = ll.llama_model_get_vocab(self._model)
        self.n_vocab = ll.llama_vocab_n_tokens(vocab)

    def run(self, prompt: list[int], count: int) -> tuple[float, list[int]]:
        """Tokens per second after the first token, and the tokens."""
        ll.llama_memory_clear(self._memory, True)
        sampler = ll.llama_sampler_init_greedy()
        ids = (ll.llama_token * len(prompt))(*prompt)
        batch = ll.llama_batch_get_one(ids, len(prompt))
        assert ll.llama_decode(self._context, batch) == 0
        out = [ll.llama_sampler_sample(sampler, self._context, -1)]
        began = time.perf_counter()
        one = (ll.llama_token * 1)()
        while len(out) < count:
            one[0] = out[-1]
            assert ll.llama_decode(self._context, ll.llama_batch_get_one(one, 1)) == 0
            out.append(ll.llama_sampler_sample(sampler, self._context, -1))
        took = time.perf_counter() - began
        ll.llama_sampler_free(sampler)
        return (count - 1) / took, out


def _say_nothing(level: int, text: bytes, data: Any) -> None:
    pass


def through_product(conductor: Conductor, prompt: list[int], count: int) -> tuple[float, list[int]]:
    """The same through the client: from the first token's arrival to the end of the reply."""
    reply = conductor.decode(
        "bench",
        tokens=prompt,
        conversation="bench",
        max_tokens=count,
        temperature=0,
        return_ids=True,
    )
    began = 0.0
    for _ in reply:
        began = began or time.perf_counter()
    took = time.perf_counter() - began
    result = reply.result()
    conductor.reset("bench", "bench")
    return (len(result.ids) - 1) / took, result.ids


def measure(rounds: int, tokens: int, threads: int) -> dict[str, object]:
    """Alternate both sides; the numbers."""
    entry = load_catalogue().find(MODEL)
    assert entry is not None
    path = model_path(entry, models_dir(WorkerConfig()), packaged_catalogue().parent)
    bare = BareLoop(path, threads)
    prompt = token_ids(PROMPT_TOKENS, bare.n_vocab)
    device = StageDevice(threads=threads)
    rows: list[tuple[float, float]] = []
    with Stage([device]) as stage, Conductor(stage.endpoint) as conductor:
        conductor.register("bench", MODEL, n_ctx=N_CTX)
        _, expected = bare.run(prompt, tokens)
        _, found = through_product(conductor, prompt, tokens)
        for _ in range(rounds):
            product_rate, found = through_product(conductor, prompt, tokens)
            bare_rate, expected = bare.run(prompt, tokens)
            rows.append((product_rate, bare_rate))
    common = min(len(found), len(expected))
    ratios = [product / plain for product, plain in rows]
    return {
        "bench": "throughput",
        "model": MODEL,
        "tokens": tokens,
        "threads": threads,
        "product_tokens_per_s": round(statistics.median(row[0] for row in rows), 2),
        "bare_tokens_per_s": round(statistics.median(row[1] for row in rows), 2),
        "ratio": round(statistics.median(ratios), 4),
        "ratio_min": round(min(ratios), 4),
        "ratio_max": round(max(ratios), 4),
        "target": 0.97,
        "same_tokens": found[:common] == expected[:common],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    result = measure(args.rounds, args.tokens, args.threads)
    if args.json:
        print(json.dumps(result))
        return
    print(f"through client, broker, worker  {result['product_tokens_per_s']} tokens/s")
    print(f"bare llama.cpp loop             {result['bare_tokens_per_s']} tokens/s")
    print(f"ratio (median of {args.rounds})             {result['ratio']} (target >= 0.97)")
    print(f"same tokens                     {result['same_tokens']}")


if __name__ == "__main__":
    main()
