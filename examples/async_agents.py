"""Several agents answer at the same time; whoever takes too long is cancelled.

Start `conductor up` first, then: python examples/async_agents.py [MODEL] [SECONDS]
"""

import asyncio
import sys

from vram_conductor.client import AsyncConductor, ConductorError

QUESTIONS = {
    "ada": "Name a prime number.",
    "bob": "Name a colour.",
    "eve": "Tell a very long story.",
}


async def ask(
    conductor: AsyncConductor, name: str, model: str, question: str, seconds: float
) -> None:
    agent = await conductor.register(name, model, n_ctx=512, slots=3, ephemeral=True)
    reply = agent.chat(question, max_tokens=200)
    try:
        # Cancelling the task that waits for a reply cancels the job: the device is free at once.
        async with asyncio.timeout(seconds):
            async for piece in reply:
                print(f"{name}: {piece!r}")
    except TimeoutError:
        result = await reply.result()
        print(f"{name}: cancelled after {result.usage.generated_tokens} tokens")
    except ConductorError as error:
        print(f"{name}: {error}")
        if error.retryable:
            print(f"{name}: may be tried again in {error.retry_after_ms or 1000} ms")


async def main(model: str = "smollm2-135m", seconds: str = "10") -> None:
    async with AsyncConductor() as conductor:
        tasks = (
            ask(conductor, name, model, question, float(seconds))
            for name, question in QUESTIONS.items()
        )
        await asyncio.gather(*tasks)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
