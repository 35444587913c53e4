"""Compiles the attention kernel with the system's C++ compiler, once per machine and version of the source.

The library lies in HALOCLINE_CACHE/kernels (default ~/.cache/halocline/kernels) under a name that hashes everything
that goes into it. It is written beside its place and renamed, so processes that build at the same time agree.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

SOURCES = ("kernel.cpp", "simd.h")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-w")
BUILD_SECONDS = 300


class BuildError(Exception):
    """The kernel cannot be compiled here; the message says why."""


def library_path() -> Path:
    """Return the compiled kernel, building it if this machine has not yet done so. Raises BuildError."""
    folder = Path(__file__).parent
    compiler = _compiler()
    runtime = openmp_runtime()
    name = f"attention-{_key(folder, compiler, runtime)}.so"
    try:
        cache = kernel_cache()
        cache.mkdir(parents=True, exist_ok=True)
        if not (cache / name).exists():
            _build(folder, compiler, runtime, cache / name)
    except OSError as error:  # a read-only or full home: build for this process alone
        cache = Path(tempfile.mkdtemp(prefix="halocline-"))
        atexit.register(shutil.rmtree, cache, ignore_errors=True)
        try:
            _build(folder, compiler, runtime, cache / name)
        except OSError:
            raise BuildError(f"cannot write to {kernel_cache()}: {error}") from error
    return cache / name


def kernel_cache() -> Path:
    """Return the folder of compiled kernels."""
    root = os.environ.get("HALOCLINE_CACHE")
    return (Path(root) if root else Path.home() / ".cache" / "halocline") / "kernels"


def openmp_runtime() -> Path | None:
    """Return the OpenMP library whose threads torch uses; None where it uses none or the system does not tell.

    The kernel is linked with that very file: with another one it would bring a second set of spinning threads, and two
    sets on the same cores slow each other down many times over. Others may be loaded and idle, so the name is not
    enough (sentencepiece brings one, and transformers loads it).
    """
    libraries = sorted((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"))
    return openmp_of(ctypes.CDLL(str(libraries[0]))) if libraries else None


def openmp_of(library: ctypes.CDLL) -> Path | None:
    """Return the file in which `library`, or what it depends on, finds its OpenMP functions."""
    try:
        address = ctypes.cast(library.omp_get_max_threads, ctypes.c_void_p).value
    except AttributeError:
        return None
    maps = Path("/proc/self/maps")
    for line in maps.read_text().splitlines() if maps.exists() and address else ():
        span, *_, path = line.split(maxsplit=5)
        low, high = (int(end, 16) for end in span.split("-"))
        if low <= address < high:
            return Path(path)
    return None


def _compiler() -> str:
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        path = shutil.which(name) if name else None
        if path:
            return path
    raise BuildError("there is no C++ compiler (c++, g++ or clang++; or name one in CXX)")


def _key(folder: Path, compiler: str, runtime: Path | None) -> str:
    """Hash what the library depends on: source, flags, compiler, the processor's instructions, the runtime."""
    digest = hashlib.sha256()
    for source in SOURCES:
        digest.update((folder / source).read_bytes())
    for part in (*FLAGS, compiler, _compiler_version(compiler), _processor(), str(runtime)):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:20]


def _compiler_version(compiler: str) -> str:
    try:
        return subprocess.run(
            [compiler, "--version"], capture_output=True, text=True, timeout=BUILD_SECONDS, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"{compiler} does not run: {error}") from error


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    told = [line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))]
    return platform.machine() + "\n" + "\n".join(sorted(set(told)))


def _build(folder: Path, compiler: str, runtime: Path | None, target: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=".build-", dir=target.parent) as scratch:
        part, library = Path(scratch) / "kernel.o", Path(scratch) / "kernel.so"
        # Compiled with -fopenmp but linked without: the flag would link the compiler's own runtime.
        openmp = ["-fopenmp"] if runtime else []
        _run([compiler, *FLAGS, *openmp, "-c", str(folder / SOURCES[0]), "-o", str(part)])
        _run([compiler, "-shared", str(part), *([str(runtime)] if runtime else []), "-o", str(library)])
        library.replace(target)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{command[0]} took longer than {BUILD_SECONDS} s") from error
    if done.returncode:
        raise BuildError(f"{' '.join(command)} failed:\n{done.stderr.strip()[-2000:]}")
