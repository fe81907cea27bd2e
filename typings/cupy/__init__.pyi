"""CuPy has no annotations, and is installed beside a GPU only. One module imports it, and what it
passes on is typed there (worker/pipeline/gpu.py)."""

from typing import Any

def __getattr__(name: str) -> Any: ...
