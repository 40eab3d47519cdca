"""Build the sdist and the wheel, and prove that a base install needs msgspec and nothing else.

The rooms are links in src/umbel; a package that lost one would build without a word. So each
archive is compared with the files of the checkout, and the wheel is imported on its own.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("interpreter", "kernels", "lang", "runtime")
KINDS = (".html", ".py", ".typed")


def expected_files() -> set[str]:
    """Return the paths, below `umbel/`, of every file of the package in the checkout."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *ROOMS, "src/umbel"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    files = {path.removeprefix("src/umbel/") for path in listed if (ROOT / path).is_file()}
    return {path for path in files if path.endswith(KINDS)}


def refuse_missing(archive: Path, members: list[str], prefix: str) -> None:
    """Exit when `archive` lacks a file of the package or holds one that the checkout lacks."""
    found = {m.removeprefix(prefix) for m in members if m.startswith(prefix)}
    found = {m for m in found if m.endswith(KINDS)}
    expected = expected_files()
    if found != expected:
        sys.exit(
            f"{archive.name}: missing {sorted(expected - found)}, "
            f"unexpected {sorted(found - expected)}"
        )


def main() -> None:
    """Build, compare, install into a fresh environment and import."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run(
            [sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        (sdist,) = folder.glob("*.tar.gz")
        (wheel,) = folder.glob("*.whl")
        with tarfile.open(sdist) as archive:
            stem = sdist.name.removesuffix(".tar.gz")
            refuse_missing(sdist, archive.getnames(), f"{stem}/src/umbel/")
        with zipfile.ZipFile(wheel) as archive_zip:
            refuse_missing(wheel, archive_zip.namelist(), "umbel/")

        python = folder / "venv" / "bin" / "python"
        venv.create(folder / "venv", with_pip=True)
        constraints = ROOT / "constraints.txt"
        subprocess.run(
            [python, "-m", "pip", "install", "-q", "-c", str(constraints), str(wheel)], check=True
        )
        subprocess.run(
            [python, "-c", "import umbel; print('wheel imports, umbel', umbel.__version__)"],
            check=True,
            cwd=folder,
        )
        umbel = folder / "venv" / "bin" / "umbel"
        subprocess.run([umbel, "--version"], check=True, cwd=folder)
        subprocess.run([umbel, "run", "--help"], check=True, cwd=folder, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
