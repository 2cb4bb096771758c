"""Uploading an exported model to the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from vitfleet.errors import UserError


def push_to_hub(folder: Path, repository: str) -> str:
    """Upload a folder as a private model repository ``owner/name`` and return its address.

    Raises
    ------
    UserError
        No token is set, or the hub refuses.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError

    token = get_token()
    if token is None:
        raise UserError(f"--push-to-hub {repository}: no token is set; set HF_TOKEN, or log in with `hf auth login`")
    hub = HfApi(token=token)
    try:
        address = str(hub.create_repo(repository, private=True, exist_ok=True))
        hub.upload_folder(repo_id=repository, folder_path=folder, commit_message="Model exported by vitfleet")
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise UserError(f"--push-to-hub {repository}: {str(error).splitlines()[0]}") from None
    return address
