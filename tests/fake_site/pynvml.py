"""``pynvml`` for worker processes of tests: put this folder on PYTHONPATH.

Constants and errors are the real module's. ``FAKE_NVML`` (JSON) says what there is: ``gpus``, and
for functions that fail their NVML error code.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_HERE = Path(__file__).resolve().parent
_spec = PathFinder.find_spec("pynvml", [at for at in sys.path if Path(at).resolve() != _HERE])
assert _spec is not None
assert _spec.loader is not None
_real = module_from_spec(_spec)
_spec.loader.exec_module(_real)
globals().update({name: value for name, value in vars(_real).items() if not name.startswith("__")})

_SCENE: dict[str, int] = json.loads(os.environ.get("FAKE_NVML", "{}"))
_GIB = 1 << 30


def _fake(name: str, answer: Any) -> Any:
    def call(*arguments: Any, **_options: Any) -> Any:
        if name in _SCENE:
            raise _real.NVMLError(_SCENE[name])
        return answer(*arguments)

    return call


_MEMORY = SimpleNamespace(total=8 * _GIB, reserved=_GIB // 4, used=_GIB, free=6 * _GIB)
_ANSWERS: dict[str, Any] = {
    "nvmlInit": lambda: None,
    "nvmlShutdown": lambda: None,
    "nvmlDeviceGetCount": lambda: _SCENE.get("gpus", 1),
    "nvmlDeviceGetHandleByIndex": lambda index: index,
    "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}{handle}",
    "nvmlDeviceGetName": lambda handle: f"Toy {handle}",
    "nvmlDeviceGetMemoryInfo": lambda _handle: _MEMORY,
    "nvmlDeviceGetComputeRunningProcesses": lambda _handle: [],
}
globals().update({name: _fake(name, answer) for name, answer in _ANSWERS.items()})
