"""Log lines: pieces, threads, sizes."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from vram_conductor.worker.llama.loglines import (
    BufferLine,
    CacheLine,
    parse_buffers,
    parse_caches,
    unknown_buffers,
)
from vram_conductor.worker.llama.logs import (
    LEVEL_CONT,
    LEVEL_DEBUG,
    LEVEL_ERROR,
    LEVEL_INFO,
    LEVEL_WARN,
    LogRouter,
)
from vram_conductor.worker.llama.sizes import measured_pool, measured_weights, on_device

if TYPE_CHECKING:
    from vram_conductor.worker.llama.engine import LlamaEngine

MIB = 1 << 20

CPU = """\
load_tensors:          CPU model buffer size =   222.51 MiB
load_tensors:   CPU_REPACK model buffer size =    12.66 MiB
llama_context:        CPU  output buffer size =     2.00 MiB
llama_kv_cache_iswa: creating non-SWA KV cache, size = 1024 cells
llama_kv_cache:        CPU KV buffer size =     3.00 MiB
llama_kv_cache: size =    3.00 MiB (  1024 cells,   3 layers,  2/1 seqs), K (f16):    1.50 MiB
llama_kv_cache_iswa: creating     SWA KV cache, size = 768 cells
llama_kv_cache:        CPU KV buffer size =    15.00 MiB
llama_kv_cache: size =   15.00 MiB (   768 cells,  15 layers,  2/1 seqs), K (f16):    7.50 MiB
llama_memory_recurrent:        CPU RS buffer size =     0.07 MiB
llama_memory_recurrent: size =    0.07 MiB (     2 cells,   4 layers,  2 seqs  0 rs_seq), R (f32)
sched_reserve:        CPU compute buffer size =     2.47 MiB
~llama_context:        CPU compute buffer size is   2.4700 MiB, matches expectation of   2.4700
""".splitlines()

CUDA = """\
load_tensors:   CPU_Mapped model buffer size =    92.10 MiB
load_tensors:        CUDA0 model buffer size =   134.20 MiB
llama_context:  CUDA_Host  output buffer size =     0.19 MiB
llama_kv_cache:      CUDA0 KV buffer size =    22.50 MiB
sched_reserve:      CUDA0 compute buffer size =    33.80 MiB
sched_reserve:  CUDA_Host compute buffer size =     4.02 MiB
""".splitlines()


def mib(value: float) -> int:
    return round(value * MIB)


def test_every_buffer_is_found_once() -> None:
    assert parse_buffers(CPU) == [
        BufferLine("weights", "CPU", mib(222.51)),
        BufferLine("weights", "CPU_REPACK", mib(12.66)),
        BufferLine("output", "CPU", mib(2.0)),
        BufferLine("kv", "CPU", mib(3.0)),
        BufferLine("kv", "CPU", mib(15.0)),
        BufferLine("recurrent", "CPU", mib(0.07)),
        BufferLine("compute", "CPU", mib(2.47)),
    ]
    assert unknown_buffers(CPU) == []


def test_caches_tell_window_from_full() -> None:
    assert parse_caches(CPU) == [
        CacheLine("kv", mib(3.0), 1024, 3),
        CacheLine("kv", mib(15.0), 768, 15, window=True),
        CacheLine("recurrent", mib(0.07), 2, 4),
    ]


def test_a_gpu_counts_its_own_memory_only() -> None:
    """Each of its buffers takes whole granules of 2 MiB, as NVML shows it."""
    assert measured_weights(CUDA, "cuda") == mib(136)
    sizes = measured_pool(CUDA, "cuda")
    assert (sizes.kv_bytes, sizes.compute_bytes) == (mib(24), mib(34))
    assert measured_weights(CPU, "cpu") == mib(222.51) + mib(12.66)
    assert measured_pool(CPU, "cpu").compute_bytes == mib(2.0) + mib(2.47)
    assert on_device("CUDA1", "cuda")
    assert not on_device("CPU", "cuda")


def test_a_buffer_of_a_new_kind_is_noticed() -> None:
    line = "llama_kv_cache_dsv4:      CUDA0 DSV4 comp state buffer size =    12.00 MiB"
    assert unknown_buffers([*CUDA, line]) == [line]


def test_lines_are_assembled_from_pieces() -> None:
    router = LogRouter()
    with router.capture() as capture:
        router.event(LEVEL_INFO, "loading ")
        router.event(LEVEL_CONT, "...")
        router.event(LEVEL_CONT, " done\n")
        router.event(LEVEL_WARN, "careful\n")
        router.event(LEVEL_INFO, "unfinished")
        router.event(LEVEL_ERROR, "load: it broke\n")
        router.event(LEVEL_ERROR, "main: giving up\n")
    assert capture.lines == [
        (LEVEL_INFO, "loading ... done"),
        (LEVEL_WARN, "careful"),
        (LEVEL_INFO, "unfinished"),
        (LEVEL_ERROR, "load: it broke"),
        (LEVEL_ERROR, "main: giving up"),
    ]
    assert capture.problem() == "it broke"
    assert list(router.recent) == ["careful", "load: it broke", "main: giving up"]


def test_captures_belong_to_their_thread_and_nest() -> None:
    router = LogRouter()
    inside, go = threading.Event(), threading.Event()
    seen: list[list[str]] = []

    def other() -> None:
        with router.capture() as capture:
            router.event(LEVEL_DEBUG, "theirs\n")
            inside.set()
            go.wait(5)
            router.event(LEVEL_DEBUG, "theirs too\n")
        seen.append(capture.texts())

    thread = threading.Thread(target=other)
    with router.capture() as outer:
        thread.start()
        inside.wait(5)
        router.event(LEVEL_INFO, "mine\n")
        with router.capture() as inner:
            router.event(LEVEL_INFO, "inner\n")
        go.set()
        thread.join(5)
        router.event(LEVEL_INFO, "mine again\n")
    router.event(LEVEL_INFO, "nobody's\n")
    assert outer.texts() == ["mine", "mine again"]
    assert inner.texts() == ["inner"]
    assert seen == [["theirs", "theirs too"]]


def test_llama_cpp_logs_from_the_calling_thread(engine: LlamaEngine) -> None:
    """Or else sizes of a load could not be told from those of another thread."""
    from gguf_models import Spec, make_model

    from vram_conductor.protocol.values import PoolShape
    from vram_conductor.worker.llama.library import library

    def load(arch: str, found: dict[str, int]) -> None:
        spec = Spec(arch=arch, n_layer=6)  # type: ignore[arg-type]
        for _ in range(6):
            with library().logs.capture() as stray:
                model = engine.load(str(make_model(spec)), arch)
                pool = model.open_pool(PoolShape(1024, 2))
            assert stray.lines == []
            found[arch] = model.measured_bytes + pool.measured_bytes
            assert pool.measured_bytes > 0
            pool.close()
            model.close()

    alone: dict[str, int] = {}
    together: dict[str, int] = {}
    for arch in ("llama", "mamba"):
        load(arch, alone)
    threads = [threading.Thread(target=load, args=(arch, together)) for arch in ("llama", "mamba")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone


def test_the_last_words_of_llama_cpp_are_not_lost_in_a_capture(
    capfd: pytest.CaptureFixture[str],
) -> None:
    from vram_conductor.worker.llama.library import library

    words = ["CUDA error: an illegal memory access\n", "  current device: 0, in f at x.cu:1\n"]
    with library().logs.capture() as capture:
        for text in (*words, "f: out of memory\n"):
            library()._on_log(LEVEL_ERROR, text.encode(), None)
    assert capture.texts() == [*(text.rstrip() for text in words), "f: out of memory"]
    assert capfd.readouterr().err == "".join(words)
