"""Valid RUN messages. *Pure.*"""

from __future__ import annotations

import msgspec

from vram_conductor.protocol.commands import Run
from vram_conductor.protocol.values import ConversationKey, Message
from vram_conductor.protocol.vectors import structure_cases
from vram_conductor.protocol.vectors.client_cases import ALL_SAMPLING

Cases = dict[str, tuple[msgspec.Struct, list[bytes]]]


def runs(epoch: int, conversation: ConversationKey, raw: bytes) -> Cases:
    """Every shape of RUN."""
    found: Cases = {
        "run": (
            Run(
                broker_epoch=epoch,
                op=11,
                job=1,
                conversation=conversation,
                version=0,
                transcript_tokens=0,
                prompt="hi",
            ),
            [],
        ),
        "run_with_transcript": (
            Run(
                broker_epoch=epoch,
                op=12,
                job=2,
                conversation=conversation,
                version=3,
                transcript_tokens=4,
                n_raw=1,
                continue_=True,
                messages=[Message("user", "more")],
                max_tokens=64,
                sampling=ALL_SAMPLING,
                stop=["."],
                logit_bias=[(3, 1.0)],
                timeout_ms=1000,
                priority=-5,
            ),
            [raw],
        ),
        "run_empty_transcript": (
            Run(
                broker_epoch=epoch,
                op=13,
                job=3,
                conversation=conversation,
                version=1,
                transcript_tokens=0,
                n_raw=1,
                tokens=[1, 2],
            ),
            [b""],
        ),
    }
    return found | structure_cases.commands(epoch)
