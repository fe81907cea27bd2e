"""Exit codes of the worker (sysexits.h): the supervisor starts again after some of them only."""

from __future__ import annotations

from vram_conductor.protocol.errors import ConductorError, InvalidArgument

EXIT_OK = 0
EXIT_USAGE = 64
EXIT_UNAVAILABLE = 69
EXIT_INTERNAL = 70
EXIT_TEMPORARY = 75

EXIT_CODES = """exit codes (sysexits.h):
   0  drained: everything is parked
  64  wrong flags, environment, configuration or catalogue
  69  the device, the arena folder or the broker does not want this worker
  70  a bug in the worker; the log has a traceback
  75  worth another try: the engine hung, or another worker still has the
      parked states
"""

_TEMPORARY = {"arena_in_use", "disk_full", "gpu_lost", "nvml_error"}


def exit_code(error: ConductorError, *, supervised: bool = False) -> int:
    """Exit code for an error that keeps the worker from starting.

    A supervisor starts a worker only when its own last one is dead: if the arenas' holder is
    alive, it belongs to another instance, and another try cannot help.
    """
    if isinstance(error, InvalidArgument):
        return EXIT_USAGE
    if supervised and error.reason == "arena_in_use" and error.details.get("alive"):
        return EXIT_UNAVAILABLE
    return EXIT_TEMPORARY if error.reason in _TEMPORARY else EXIT_UNAVAILABLE
