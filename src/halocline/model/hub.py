"""Models from the Hugging Face hub, or from its cache when offline (HF_HOME, HF_HUB_OFFLINE and HF_TOKEN hold)."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from halocline.errors import ModelError

_METADATA = ("*.json", "*.jinja", "*.txt", "*.model")
"""Config, tokenizer and templates. Never weights in other forms: pickles are not even fetched."""


def looks_like_id(name: str) -> bool:
    """Whether `name` has the form of a hub id: owner/model."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name) is not None


def hub_folder(name: str, *, revision: str | None = None, weights: bool = True, code: bool = False) -> Path:
    """Return the folder with the snapshot of hub model `name`, fetching what the hub's cache lacks.

    `weights=False` fetches config and tokenizer only; `code=True` the model's Python files too. Raises ModelError
    when it is not there, needs an accepted licence, or cannot be reached and is not in the cache.
    """
    patterns = [*_METADATA, *(["*.safetensors"] if weights else []), *(["*.py"] if code else [])]
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except GatedRepoError:
        raise ModelError(
            f"{name!r} needs its licence accepted: visit https://huggingface.co/{name} and set HF_TOKEN"
        ) from None
    except RevisionNotFoundError:
        raise ModelError(f"{name!r} has no revision {revision!r} on the Hugging Face hub") from None
    except RepositoryNotFoundError:
        raise ModelError(
            f"{name!r} is neither a folder here nor a model on the Hugging Face hub (if it is private, set HF_TOKEN)"
        ) from None
    except (LocalEntryNotFoundError, OfflineModeIsEnabled):
        raise ModelError(
            f"{name!r} is not in the Hugging Face cache and the hub cannot be reached (or HF_HUB_OFFLINE is set); "
            f"fetch it where there is a network: hf download {name}"
        ) from None
    except (HfHubHTTPError, HFValidationError, httpx.HTTPError) as error:
        raise ModelError(f"cannot fetch {name!r} from the Hugging Face hub: {error}") from error
