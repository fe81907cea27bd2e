"""Several models that stream at once, over the same replies one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vram_conductor.client.bench_bed import TURN_S, Bed, open_bed, token_ids
from vram_conductor.client.bench_report import BenchReport, Figure, median
from vram_conductor.client.bench_setting import BenchModel, Setting
from vram_conductor.client.bench_stream import Stream

PROMPT_TOKENS = 32
WANTED = 2.0
MODELS_MAX = 3
CPU_CAPACITY_BYTES = 4 << 30


def measure(setting: Setting, report: BenchReport, say: Callable[[str], None]) -> None:
    """All rounds; each compares both ways within a second or so.

    Raises:
        InvalidArgument: ``too_few_models``.
        ConductorError: what the product failed with.
    """
    setting.need(2)
    models = setting.models[-MODELS_MAX:]
    tokens = int(setting.extra.get("tokens") or (512 if setting.on_cuda else 24))
    n_ctx = 8192 if setting.on_cuda else 1024
    report.setting["tokens"] = tokens
    with open_bed(setting, "reserve", 0 if setting.on_cuda else CPU_CAPACITY_BYTES) as bed:
        report.device_name = bed.status().name
        for index, model in enumerate(models):
            say(f"registering {model.name}")
            agent = _agent(index)
            bed.conductor.register(agent, model.path, n_ctx=n_ctx, device=setting.device)
        _streams(bed, len(models), 8, at_once=False)
        rounds: list[tuple[list[Stream], list[Stream]]] = []
        for index in range(setting.number(cuda=5, cpu=2)):
            if rounds and not setting.left_s:
                report.notes.append(f"{index} rounds only: the time was over")
                break
            say(f"round {index + 1}")
            alone = _streams(bed, len(models), tokens, at_once=False)
            both = _streams(bed, len(models), tokens, at_once=True)
            rounds.append((alone, both))
        report.data["mechanism"] = _mechanism(bed)
    _figures(report, models, rounds)


def _mechanism(bed: Bed) -> str:
    worker = bed.status().worker
    return f"{worker.mechanism}: {worker.mechanism_note}" if worker else ""


def _agent(index: int) -> str:
    """A file's name may be none that an agent can have."""
    return f"m{index}"


def _streams(bed: Bed, models: int, tokens: int, *, at_once: bool) -> list[Stream]:
    """One fresh conversation per model, all of the same length."""
    found: list[Stream] = []
    for index in range(models):
        # The end of one reply is written down beside the next: let nobody pay for that.
        agent = _agent(index)
        bed.conductor.reset(agent)
        prompt = token_ids(PROMPT_TOKENS, seed=index)
        stream = Stream(bed, agent, prompt, max_tokens=tokens)
        found.append(stream)
        if not at_once:
            stream.join(TURN_S)
    for stream in found:
        stream.join(TURN_S)
    return found


def _figures(
    report: BenchReport,
    models: Sequence[BenchModel],
    rounds: Sequence[tuple[list[Stream], list[Stream]]],
) -> None:
    """Total rates: all tokens over the time from the first job's sending to the last token."""
    alone_rates, both_rates, ratios = [], [], []
    for alone, both in rounds:
        in_turn = sum(stream.at_s[-1] - stream.began_s for stream in alone)
        at_once = max(stream.at_s[-1] for stream in both) - min(s.began_s for s in both)
        alone_rates.append(sum(stream.tokens for stream in alone) / in_turn)
        both_rates.append(sum(stream.tokens for stream in both) / at_once)
        ratios.append(both_rates[-1] / alone_rates[-1])
    wanted = WANTED if report.device.startswith("cuda") and len(models) == MODELS_MAX else None
    what = f"{len(models)} models at once over one after the other"
    report.add(Figure("ratio", what, median(ratios), "x", wanted, ">="))
    report.add(Figure("at_once", "all at once", median(both_rates), "tokens/s"))
    report.add(Figure("in_turn", "one after the other", median(alone_rates), "tokens/s"))
    for index, model in enumerate(models):
        alone_rate = median([alone[index].tokens_per_s() for alone, _ in rounds])
        both_rate = median([both[index].tokens_per_s() for _, both in rounds])
        note = f"alone {alone_rate:.0f}"
        what = f"{model.name} while the others stream"
        report.add(Figure(f"rate_{index}", what, both_rate, "tokens/s", note=note))
    report.data |= {
        "ratios": ratios,
        "models": [model.name for model in models],
        "alone": [median([alone[i].tokens_per_s() for alone, _ in rounds]) for i in _span(models)],
        "both": [median([both[i].tokens_per_s() for _, both in rounds]) for i in _span(models)],
        "timelines": [_timeline(streams, models) for streams in rounds[-1]],
    }
    if not report.device.startswith("cuda"):
        report.notes.append("a cpu computes one model at a time: no gain is expected there")


def _span(models: Sequence[BenchModel]) -> range:
    return range(len(models))


def _timeline(streams: Sequence[Stream], models: Sequence[BenchModel]) -> list[dict[str, object]]:
    """Per stream when its pieces came, in ms since the first job was sent."""
    zero = min(stream.began_s for stream in streams)
    return [
        {
            "model": model.name,
            "ms": [round(1000 * (when - zero), 2) for when in stream.at_s],
            "tokens": list(stream.counts),
        }
        for stream, model in zip(streams, models, strict=True)
    ]
