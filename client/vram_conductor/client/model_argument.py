"""What ``--model`` names."""

from __future__ import annotations

from pathlib import Path

_SUFFIX = ".gguf"


def model_argument(given: str, endpoint: str, here: Path = Path()) -> str:
    """What a broker is told for ``--model``.

    A relative path is meant from where the command was typed; a worker stands elsewhere and would
    look for it in its models folder. So a file that is here, of a broker on this machine (ipc),
    gets its absolute path. Everything else is the worker's to find: names of the catalogue, names
    and relative paths in the models folder, files of another machine.

    Args:
        given: as it was typed.
        endpoint: of the broker.
        here: where it was typed; by default the current directory.
    """
    names_file = "/" in given or given.endswith(_SUFFIX)
    if not names_file or not endpoint.startswith("ipc://") or "\0" in given:
        return given
    try:
        path = here / Path(given).expanduser()
        return str(path.absolute()) if path.is_file() else given
    except (OSError, RuntimeError):  # too long, no permission to look, no such home
        return given
