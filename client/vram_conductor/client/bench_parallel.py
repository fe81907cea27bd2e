"""Several models that stream at once, over the same replies one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

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
            # Whatever drifts favours neither side: they take turns in going first.
            at_once_first = index % 2 == 1
            one = _streams(bed, len(models), tokens, at_once=at_once_first)
            other = _streams(bed, len(models), tokens, at_once=not at_once_first)
            rounds.append((other, one) if at_once_first else (one, other))
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


@dataclass(frozen=True)
class Round:
    """What one round comes to; rates in tokens/s.

    Attributes:
        alone: rate of each model while no other streams, from its first piece to its last.
        beside: rate of each while all stream.
        in_turn: all tokens, over the time of one job after the other, from sending to last piece.
        at_once: all tokens, over the time from the first sending until the last job has ended.
    """

    alone: list[float]
    beside: list[float]
    in_turn: float
    at_once: float

    @property
    def window_ratio(self) -> float:
        """What all say together while all stream, over the mean of what they say alone."""
        return sum(self.beside) / (sum(self.alone) / len(self.alone))

    @property
    def ratio(self) -> float:
        """Jobs of equal length, at once over one after the other."""
        return self.at_once / self.in_turn


def summed_up(alone: Sequence[Stream], both: Sequence[Stream]) -> Round:
    """``alone``: streams that came one after the other; ``both``: at once."""
    begin_s = max(stream.at_s[0] for stream in both)
    end_s = min(stream.at_s[-1] for stream in both)
    return Round(
        alone=[stream.tokens_per_s() for stream in alone],
        beside=[stream.tokens_per_s(begin_s, end_s) for stream in both],
        in_turn=sum(stream.tokens for stream in alone)
        / sum(stream.at_s[-1] - stream.began_s for stream in alone),
        at_once=sum(stream.tokens for stream in both)
        / (max(stream.at_s[-1] for stream in both) - min(stream.began_s for stream in both)),
    )


def _figures(
    report: BenchReport,
    models: Sequence[BenchModel],
    streams: Sequence[tuple[list[Stream], list[Stream]]],
) -> None:
    rounds = [summed_up(alone, both) for alone, both in streams]
    wanted = WANTED if report.device.startswith("cuda") and len(models) == MODELS_MAX else None
    _ratios(report, len(models), rounds, wanted)
    alone_rates = [median(rates) for rates in zip(*(item.alone for item in rounds), strict=True)]
    both_rates = [median(rates) for rates in zip(*(item.beside for item in rounds), strict=True)]
    for index, (alone, both) in enumerate(zip(alone_rates, both_rates, strict=True)):
        what = f"{models[index].name} while all stream"
        note = f"alone {alone:.0f}"
        report.add(Figure(f"rate_{index}", what, both, "tokens/s", note=note))
    report.data |= {
        "models": [model.name for model in models],
        "alone": alone_rates,
        "both": both_rates,
        "rounds": [
            {"window_ratio": item.window_ratio, "ratio": item.ratio, **asdict(item)}
            for item in rounds
        ],
        "timelines": [_timeline(side, models) for side in streams[-1]],
    }
    if not report.device.startswith("cuda"):
        report.notes.append("a cpu computes one model at a time: no gain is expected there")


def _ratios(report: BenchReport, count: int, rounds: Sequence[Round], wanted: float | None) -> None:
    """Medians over the rounds of both ratios, and of what they are made of."""
    rows: list[tuple[str, str, list[float], str]] = [
        (
            "window_ratio",
            f"rate while all {count} stream over the mean of their rates alone",
            [item.window_ratio for item in rounds],
            "x",
        ),
        (
            "ratio",
            f"{count} jobs of equal length, until the last has ended, over one after the other",
            [item.ratio for item in rounds],
            "x",
        ),
        ("window", f"while all {count} stream", [sum(item.beside) for item in rounds], "tokens/s"),
        (
            "alone",
            "mean of the rates alone",
            [sum(item.alone) / count for item in rounds],
            "tokens/s",
        ),
        ("at_once", "until the last has ended", [item.at_once for item in rounds], "tokens/s"),
        ("in_turn", "one after the other", [item.in_turn for item in rounds], "tokens/s"),
    ]
    for key, what, values, unit in rows:
        limit = wanted if unit == "x" else None
        report.add(Figure(key, what, median(values), unit, limit, ">="))
    report.notes.append(
        "the first ratio counts only while all stream; the second also counts the start and the "
        "end, where the slowest model still has to say what the others have said already"
    )


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
