"""Compile the pure core to machine code: python scripts/compile_core.py (or `make compiled`).

mypyc makes C of a copy of the sources, gcc compiles it on all cores, and the result is put into build/core/ as a whole,
with the hash of what it was made of. The copy has an empty `halocline/__init__.py`, so that mypy reads the core only.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mypyc.build import mypycify
from setuptools import Distribution, Extension
from setuptools.command.build_ext import build_ext

from halocline.compiled import BUILD, INTERPRETED, MANIFEST, PACKAGE, core_sources, sources_hash


def main() -> None:
    """Build, and replace what was built before."""
    began = time.monotonic()
    made_of = sources_hash()
    with tempfile.TemporaryDirectory(prefix="halocline-core-") as folder:
        stage = Path(folder)
        os.chdir(stage)
        _copy_sources(stage)
        wanted = [f"halocline/{name}" for name in core_sources()]
        extensions = mypycify(
            wanted, opt_level="1", debug_level="0", multi_file=True, group_name="halocline_core", target_dir="c"
        )
        print(f"C of {len(wanted)} modules after {time.monotonic() - began:.0f} s", flush=True)
        modules = _compile(extensions)
        if made_of != sources_hash():
            sys.exit("the sources changed while they were compiled: run this again")
        shutil.rmtree(BUILD, ignore_errors=True)
        shutil.copytree("lib", BUILD)
        (BUILD / MANIFEST).write_text(json.dumps({"hash": made_of, "modules": modules}, indent=1), encoding="utf-8")
    print(f"{len(modules)} modules in {BUILD} after {time.monotonic() - began:.0f} s")


def _copy_sources(stage: Path) -> None:
    for name in (*core_sources(), *INTERPRETED, "params.py"):
        target = stage / "halocline" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(PACKAGE / name, target)
    for folder in ("", "memory", "cache", "schedule"):
        (stage / "halocline" / folder / "__init__.py").touch()


def _compile(extensions: list[Extension]) -> dict[str, str]:
    """Compile all C files, several at once, and link; return each module's file within the build."""
    command = build_ext(Distribution({"ext_modules": extensions}))
    command.build_lib, command.build_temp = "lib", "o"
    command.ensure_finalized()
    command.run = lambda: None  # type: ignore[method-assign] # only what it prepares is wanted
    from setuptools._distutils.ccompiler import new_compiler
    from setuptools._distutils.sysconfig import customize_compiler

    compiler = new_compiler()
    customize_compiler(compiler)
    includes = list(command.include_dirs or [])

    def compiled(source: str, extension: Extension) -> str:
        args = extension.extra_compile_args
        found = compiler.compile(
            [source], "o", include_dirs=includes + extension.include_dirs, extra_postargs=args, depends=[]
        )
        return str(found[0])

    modules = {}
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        waiting = [[pool.submit(compiled, source, ext) for source in ext.sources] for ext in extensions]
        for extension, objects in zip(extensions, waiting, strict=True):
            file = command.get_ext_filename(extension.name)
            compiler.link_shared_object([one.result() for one in objects], str(Path("lib") / file))
            modules[extension.name] = file
    return modules


if __name__ == "__main__":
    main()
