"""The C++ kernels for CPUs: compiled for this machine at first use, kept in a cache, optional.

Without a C++ compiler, or with ACACHE_KERNELS_NATIVE=0, `load_library` returns None and plain torch serves.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
HEADER = FOLDER / "cpu_vector.h"
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-fopenmp", "-shared")


@functools.cache
def load_library(name: str) -> ctypes.CDLL | None:
    """The compiled `name`.cpp, or None, with the reason logged once, where it cannot be had."""
    if os.environ.get("ACACHE_KERNELS_NATIVE") == "0":
        return None
    try:
        return ctypes.CDLL(str(_compiled(name)))
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or error
        logger.warning("%s runs without its C++ kernel, in plain torch: %s", name, detail)
        return None


def _compiled(name: str) -> Path:
    """Path of the shared library for this source, compiler and processor, compiled when it is not cached."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise FileNotFoundError("no C++ compiler (g++) was found")
    source = FOLDER / f"{name}.cpp"
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    identity = "\n".join((source.read_text(), HEADER.read_text(), *FLAGS, version, _processor()))
    library = _cache_folder() / f"{name}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
    if not library.exists():
        logger.info("compiling %s into %s", source.name, library)
        draft = library.with_suffix(f".{os.getpid()}")
        command = [compiler, *FLAGS, str(source), "-o", str(draft)]
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
        draft.replace(library)  # atomic: several processes may compile at once
    return library


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "acache_kernels"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="acache_kernels-"))


def _processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
