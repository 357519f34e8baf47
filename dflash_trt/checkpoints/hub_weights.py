"""Weights from the Hugging Face hub into its cache, each file from where an earlier call stopped.

huggingface_hub goes on with a file only while the process lives; the next one begins it again.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor, as_completed
from io import BufferedWriter, FileIO
from pathlib import Path
from threading import Event

from dflash_trt.errors import InputError

_AT_ONCE = 8  # files


def fetch_weights(repo: str, snapshot: Path, wanted: str, unwanted: list[str]) -> None:
    """Fetch the files of `repo` that match `wanted` and are not in `snapshot`, a folder of the hub's
    cache that was made for the present commit. They are put among the cache's blobs, where
    `huggingface_hub.snapshot_download` finds them.

    Raises: `InputError` for a file that is not what the hub says it is, else what huggingface_hub
    raises.
    """
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.constants import MAX_HTTP_DOWNLOAD_SIZE
    from huggingface_hub.errors import CachedRepoTreeNotFoundError
    from huggingface_hub.utils import filter_repo_objects

    try:
        files = get_cached_repo_tree(repo, revision=snapshot.name)
    except CachedRepoTreeNotFoundError:  # offline, with a cache of an older huggingface_hub
        return
    names = [file.path for file in files if file.size <= MAX_HTTP_DOWNLOAD_SIZE]
    asked = filter_repo_objects(names, allow_patterns=wanted, ignore_patterns=unwanted)
    missing = [name for name in asked if not (snapshot / name).exists()]
    stop = Event()
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        fetched = [pool.submit(_fetch, repo, snapshot, name, stop) for name in missing]
        try:
            for future in as_completed(fetched):
                future.result()
        finally:
            stop.set()  # where one has failed or the user has had enough, the others end too
            pool.shutdown(wait=False, cancel_futures=True)


def _fetch(repo: str, snapshot: Path, name: str, stop: Event) -> None:
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import WeakFileLock, build_hf_headers

    # Compressed, it could not be sent from a byte on.
    headers = build_hf_headers() | {"Accept-Encoding": "identity"}
    url = hf_hub_url(repo, name, revision=snapshot.name)
    described = get_hf_file_metadata(url, headers=headers)
    if described.etag is None or described.size is None:
        raise InputError(f"{repo}: the hub does not say what {name} is")
    storage = snapshot.parents[1]
    blob = storage / "blobs" / described.etag
    part = blob.with_name(f"{blob.name}.incomplete")
    lock = storage.parent / ".locks" / storage.name / f"{blob.name}.lock"
    for path in (part, lock):
        path.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        if blob.exists():
            return
        with _Part(part, stop) as file:
            if file.tell() > described.size:
                file.seek(0)
                file.truncate()
            http_get(
                url,
                file,
                resume_size=file.tell(),
                headers=headers,
                expected_size=described.size,
                displayed_filename=name,
            )
        _check(part, described.etag, f"{repo}: {name}")
        part.rename(blob)


class _Part(BufferedWriter):
    """What is here of a file, to be written behind its end, and no longer once `stop` is set."""

    def __init__(self, path: Path, stop: Event) -> None:
        super().__init__(FileIO(path, "ab"))
        self._stop = stop

    def write(self, data: bytes) -> int:  # type: ignore[override]
        if self._stop.is_set():
            raise InterruptedError("another file could not be fetched")
        return super().write(data)


def _check(part: Path, etag: str, what: str) -> None:
    """The name that the hub has for a large file is its SHA-256."""
    if len(etag) != 64:
        return
    with part.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != etag:
        part.unlink()
        raise InputError(
            f"{what} came with SHA-256 {found[:12]}.. where the hub says {etag[:12]}..; "
            f"it was taken away, fetch it again"
        )
