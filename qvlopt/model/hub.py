"""Fetches a checkpoint from the Hugging Face hub into its own cache: only when a recipe names a hub id."""

from __future__ import annotations

import os
import re
from pathlib import Path

from qvlopt.errors import NotFetchedError, RunError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
WANTED = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]
"""Weights in safetensors, settings and tokenizer files of the repository's top level; nothing that can run."""


def is_hub_id(path: str) -> bool:
    """Whether `path` is written as ORGANISATION/NAME. A folder of that name, if there is one, goes first."""
    return HUB_ID.fullmatch(path) is not None


def download(repository: str, *, revision: str | None, cached: bool = False) -> Path:
    """The snapshot folder of a repository; offline (HF_HUB_OFFLINE), or with `cached`, only what the cache holds.

    Raises RunError naming the repository, the revision and the cache; NotFetchedError where only `cached` kept it from being fetched.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import CachedRepoTreeNotFoundError, LocalEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

    offline = cached or constants.is_offline_mode() or os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}
    where = f"{repository} at revision {revision or 'main'}"
    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=WANTED, ignore_patterns=["*/*"], local_files_only=offline))
    except RevisionNotFoundError as error:
        raise RunError(f"the hub has no revision {revision!r} of {repository}", hint="set model.revision") from error
    except RepositoryNotFoundError as error:
        raise RunError(
            f"there is no folder {repository}, and the hub has no such repository or does not show it",
            hint="check the path; for a gated model accept its terms and log in with `hf auth login`",
        ) from error
    except (LocalEntryNotFoundError, CachedRepoTreeNotFoundError) as error:
        absent = f"there is no folder {repository}, and {where} is not in the cache {constants.HF_HUB_CACHE}"
        hint = "download it once with a connection, or give the path of a local folder"
        if cached:
            raise NotFetchedError(f"{absent}; nothing is fetched to plan", hint=hint) from error
        raise RunError(f"{absent}; {'HF_HUB_OFFLINE is set' if offline else 'the hub cannot be reached'}", hint=hint) from error
    except (OSError, ValueError) as error:
        raise RunError(f"downloading {where} failed: {error}", hint=f"the cache is {constants.HF_HUB_CACHE}; run again to go on") from error
