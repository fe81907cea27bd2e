"""Three agents work on one text in turns and share one device; each keeps its own conversation.

Start `conductor up` first, then: python examples/three_agents.py [MODEL]
"""

import sys

from vram_conductor.client import Agent, Conductor, LedgerDeny

ROLES = {
    "py-coder": "You write short Python functions.",
    "py-reviewer": "You name one weakness of the code you are shown.",
    "py-writer": "You explain code to a beginner in one sentence.",
}


def admit(conductor: Conductor, name: str, model: str) -> Agent:
    """Register an agent that goes with this program; take a smaller context if we have to."""
    try:
        return conductor.register(name, model, n_ctx=1024, temperature=0, ephemeral=True)
    except LedgerDeny as deny:
        if deny.largest_n_ctx == 0:
            raise
        print(deny)
        n_ctx = deny.largest_n_ctx
        return conductor.register(name, model, n_ctx=n_ctx, temperature=0, ephemeral=True)


def main(model: str = "smollm2-135m") -> None:
    with Conductor() as conductor:
        agents = [admit(conductor, name, model) for name in ROLES]
        text = "Write a function that returns the larger of two numbers."
        for turn in range(2):
            for agent in agents:
                system = ROLES[agent.name] if turn == 0 else None
                print(f"\n--- {agent.name}")
                with agent.chat(text, system=system, max_tokens=24) as reply:
                    for piece in reply:
                        print(piece, end="", flush=True)
                text = reply.text or text
                usage = reply.result().usage
                print(
                    f"\n    [{usage.reused_tokens} of {usage.prompt_tokens} prompt tokens re-used, "
                    f"first token after {usage.ttft_ms:.0f} ms, KV restored: {usage.swap.restored}]"
                )


if __name__ == "__main__":
    main(*sys.argv[1:])
