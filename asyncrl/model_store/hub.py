"""Models by their Hub name, through huggingface_hub's own cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from asyncrl.errors import ModelError
from asyncrl.model_store.folder import missing_parts

_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py", "pytorch_model*.bin"]


def snapshot(name: str, say: Callable[[str], None]) -> Path:
    """The folder of a Hub model: the cached copy if it is whole, otherwise from the Hub.

    Raises:
        ModelError: the name is none, the Hub does not have it or cannot be reached.
    """
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, allow_patterns=_FILES, local_files_only=True))
        if not missing_parts(folder):
            return folder
    except HFValidationError as e:
        raise _error(name, "it is not a valid Hub name") from e
    except (LocalEntryNotFoundError, OSError, ValueError):
        pass  # not in the cache
    say(f"model {name}: asking the Hugging Face Hub")
    try:
        return Path(snapshot_download(name, allow_patterns=_FILES))
    except (httpx.HTTPError, OSError, ValueError) as e:
        raise _error(name, _why(e)) from e


def _why(error: Exception) -> str:
    """One line: what the Hub's library says runs over many, with advice that does not apply."""
    return {
        "RepositoryNotFoundError": "the Hub has no such model (or it needs a login)",
        "GatedRepoError": "the model is gated: accept its terms on the Hub and log in",
        "LocalEntryNotFoundError": "the Hub cannot be reached and the model is not in its cache",
        "OfflineModeIsEnabled": "HF_HUB_OFFLINE is set and the model is not in the Hub's cache",
    }.get(type(error).__name__, f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
          if str(error) else type(error).__name__)  # fmt: skip


def _error(name: str, why: str) -> ModelError:
    return ModelError(
        f"model.name={name}: no such folder here, and {why}: "
        "give the path of a local folder, or a built-in name (smollm2-135m, tiny)"
    )
