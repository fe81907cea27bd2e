"""nvidia-ml-py has no annotations. worker/vram.py alone imports it, and types what it passes on."""

from typing import Any

def __getattr__(name: str) -> Any: ...
