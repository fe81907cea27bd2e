"""Where a command looks for its configuration when no flag names one; all look alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from vram_conductor.protocol.config import Config


def check_search(read: Callable[[dict[str, str]], Config], home: Path) -> None:
    """``read``: the configuration that the command takes under an environment, once there are
    files. ``home``: an empty folder."""
    env = {"HOME": str(home)}
    for number, folder in enumerate((".config", "xdg"), 1):
        path = home / folder / "vram-conductor/conductor.toml"
        path.parent.mkdir(parents=True)
        path.write_text(f'[broker]\ndrain_ms = {number}\n[[device]]\nid = "cpu"\nkind = "cpu"\n')
    assert read(env).broker.drain_ms == 1
    env["XDG_CONFIG_HOME"] = str(home / "xdg")
    assert read(env).broker.drain_ms == 2
    (home / "c.toml").write_text('[broker]\ndrain_ms = 3\n[[device]]\nid = "x"\nkind = "cpu"\n')
    env["VRAM_CONDUCTOR_CONFIG"] = str(home / "c.toml")
    assert read(env).broker.drain_ms == 3
