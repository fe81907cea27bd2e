"""What the Hugging Face hub, or the way to it, refuses, as typed errors that say what to do."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import TYPE_CHECKING

from vram_conductor.protocol.errors import (
    ConductorError,
    FailedPrecondition,
    NotFound,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)

if TYPE_CHECKING:
    from httpx2 import Response
    from huggingface_hub.errors import HfHubHTTPError

RETRY_AFTER_S_MAX = 60.0
"""Who is told to wait longer is told so, and comes back himself."""

_PASSING = frozenset({408, 425, 429})


def client_missing(error: ImportError) -> FailedPrecondition:
    """The hub's client library cannot be imported."""
    return FailedPrecondition(
        "hub_client_missing",
        f"models of the Hugging Face hub need its client ({error}); in a clone of the project: "
        "pip install '.[models]'",
    )


@contextlib.contextmanager
def explained(endpoint: str, repo: str = "") -> Generator[None]:
    """A block that talks to the hub at ``endpoint``, about ``repo`` or none.

    Raises:
        NotFound: ``no_such_repo``, ``no_such_file``.
        PermissionDenied: ``model_gated``, ``hub_denied``; Unauthenticated: ``hub_denied``.
        FailedPrecondition: ``hub_offline``.
        Unavailable: ``hub_unavailable``: no connection, no answer in time, or the hub is busy or
            broken; ``retryable``, perhaps with ``retry_after_ms``.
    """
    from httpx2 import HTTPError, InvalidURL
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        yield
    except OfflineModeIsEnabled:
        raise FailedPrecondition(
            "hub_offline",
            "HF_HUB_OFFLINE is set, so the Hugging Face hub is not asked; unset it, or copy the "
            "model's file into the models folder (conductor models list names both)",
        ) from None
    except HfHubHTTPError as error:
        raise _refusal(error, endpoint, repo) from None
    except (HTTPError, InvalidURL) as error:
        raise Unavailable(
            "hub_unavailable",
            f"cannot reach {endpoint}: {_words(error)}; check the network (HTTPS_PROXY, "
            "HF_ENDPOINT), then run it again",
            retryable=True,
            endpoint=endpoint,
        ) from None


def _refusal(error: HfHubHTTPError, endpoint: str, repo: str) -> ConductorError:
    from huggingface_hub.errors import (
        GatedRepoError,
        RemoteEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    status = error.response.status_code
    where = f"{endpoint}/{repo}"
    if isinstance(error, GatedRepoError):
        return _gated(where, repo)
    if isinstance(error, RevisionNotFoundError | RemoteEntryNotFoundError):
        what = "file" if isinstance(error, RemoteEntryNotFoundError) else "revision"
        return NotFound(
            "no_such_file",
            f"{repo} has no such {what} (any more); see: conductor models search {repo}",
            repo=repo,
        )
    if isinstance(error, RepositoryNotFoundError) or (status == 404 and repo):
        return NotFound(
            "no_such_repo",
            f"the hub has no {repo}, or shows it to its owner only; look for it with: conductor "
            f"models search WORDS; for a private one {_token_advice()}",
            repo=repo,
        )
    if status == 401:
        return Unauthenticated("hub_denied", _unknown(endpoint), status=status)
    if status in _PASSING or status >= 500:
        return _passing(error.response, endpoint)
    said = error.server_message or f"HTTP {status}"
    return PermissionDenied(
        "hub_denied",
        f"the hub refuses {repo or endpoint}: {said.strip()}; look at {where} in a browser, and "
        "at what your token may read",
        status=status,
    )


def _unknown(endpoint: str) -> str:
    from huggingface_hub import get_token

    if not get_token():
        return f"{endpoint} wants to know who asks: {_token_advice()}"
    return (
        "the hub does not accept this token (HF_TOKEN, or that of `hf auth login`): "
        f"make another at {endpoint}/settings/tokens, or unset it"
    )


def _gated(where: str, repo: str) -> PermissionDenied:
    from huggingface_hub import get_token

    if get_token():
        advice = (
            f"the account of your token has not accepted its terms, or waits to be let in: log in "
            f"at {where}, accept them, then run it again"
        )
    else:
        advice = f"log in at {where}, accept its terms, then {_token_advice()}"
    return PermissionDenied("model_gated", f"{repo} is gated: {advice}", repo=repo)


def _token_advice() -> str:
    return "set HF_TOKEN to a token of your account, or run: hf auth login"


def _passing(response: Response, endpoint: str) -> Unavailable:
    wait_s = _retry_after_s(response)
    what = "is asked too often" if response.status_code == 429 else "has a fault"
    return Unavailable(
        "hub_unavailable",
        f"{endpoint} {what} (HTTP {response.status_code}); run it again later: what has come "
        "is kept",
        retryable=True,
        retry_after_ms=None if wait_s is None else round(1000 * wait_s),
        endpoint=endpoint,
        status=response.status_code,
    )


def _retry_after_s(response: Response) -> float | None:
    """RFC 9110's delay in seconds; dates are left out."""
    text = str(response.headers.get("Retry-After", ""))
    return float(text) if text.isascii() and text.isdigit() else None


def _words(error: Exception) -> str:
    return str(error).strip().rstrip(".") or type(error).__name__
