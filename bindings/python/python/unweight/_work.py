"""The functions that work on whole models: `compress`, `plan`, `decompress`, `verify` and `inspect`."""

from __future__ import annotations

import operator
import os
import warnings
from typing import Any, Callable, NamedTuple, Optional, Sequence, Union

from . import _native

Path = Union[str, bytes, "os.PathLike[str]"]


class Progress(NamedTuple):
    """The progress of the work, passed to a callback."""

    done_bytes: int
    total_bytes: int
    """0 until the total is known."""
    file: str
    tensor: str


Callback = Callable[[Progress], object]


def _choice(
    profile: str,
    scope: Optional[str],
    code_limit: Optional[int],
    include: Sequence[str],
    exclude: Sequence[str],
    skip: Sequence[str],
    plan_file: Optional[Path],
    threads: Optional[int],
) -> dict[str, Any]:
    return {
        "profile": profile,
        "scope": scope,
        "code_limit": _count("code_limit", code_limit),
        "include": _pattern_list("include", include),
        "exclude": _pattern_list("exclude", exclude),
        "skip": _pattern_list("skip", skip),
        "plan_file": _path(plan_file),
        "threads": _count("threads", threads),
    }


def _count(name: str, count: Optional[int]) -> Optional[int]:
    return None if count is None else _unsigned(name, count)


def _unsigned(name: str, given: int) -> int:
    if isinstance(given, bool) or not hasattr(given, "__index__"):
        raise TypeError(f"{name}={given!r}; give a whole number")
    if not 0 <= operator.index(given) < 2**64:
        raise ValueError(f"{name}={given!r}; give a number from 0 to 2**64 - 1")
    return operator.index(given)


def _ram(count: Optional[int]) -> Optional[int]:
    ram = _count("ram_bytes", count)
    if ram == 0:
        raise ValueError("ram_bytes=0; give 1 or more, or None for 1 GiB")
    return ram


def _path(path: Optional[Path]) -> Optional[str]:
    return None if path is None else os.fsdecode(path)


def _callback(progress: Optional[Callback]) -> Optional[Callback]:
    # Checked now, because the callback is first called after the work has begun.
    if progress is not None and not callable(progress):
        raise TypeError(f"progress={progress!r}; give a function of a Progress")
    return progress


def _pattern_list(name: str, patterns: Sequence[str]) -> list[str]:
    if isinstance(patterns, str):
        raise TypeError(f"{name} is a string; give a list of patterns: [{patterns!r}]")
    return list(patterns)


def compress(
    source: Path,
    output: Path,
    *,
    profile: str = "distribution",
    scope: Optional[str] = None,
    code_limit: Optional[int] = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    skip: Sequence[str] = (),
    plan_file: Optional[Path] = None,
    threads: Optional[int] = None,
    ram_bytes: Optional[int] = None,
    resume: bool = False,
    force: bool = False,
    verify: str = "full",
    sha256: bool = False,
    base: Optional[Path] = None,
    progress: Optional[Callback] = None,
) -> dict[str, Any]:
    """Compresses a model directory to a bundle. The bundle appears at `output` only when it is complete.

    Args:
        source: model directory with safetensors files. A DFloat11 directory is decoded to BF16 first, in a temporary
            directory next to `output`; `progress` then counts twice.
        output: bundle directory to write.
        profile: what to optimize for: `"distribution"` (small), `"archive"` (smallest), `"inference"`, `"palette"`,
            `"packed"` (fastest on a GPU) or `"compact"`.
        scope: tensors to compress: `"mlp"`, `"linear"` (MLP and attention) or `"all"`; `None` is the profile's default.
        code_limit: longest Huffman code, 6 to 15 bits; `None` is the default.
        include: glob patterns (`*`, `?`) of tensor names; if given, only matching tensors are compressed.
        exclude: patterns of tensor names that stay raw.
        skip: patterns of files and directories next to the weights to leave out.
        plan_file: JSON file with an encoding per tensor.
        threads: number of threads; `None` is all processors.
        ram_bytes: memory limit for tensors in work, in bytes; `None` is 1 GiB. A larger tensor is encoded alone.
        resume: reuse the finished files of an interrupted run with the same options.
        force: replace an existing bundle once the new one is complete.
        verify: tensors to decode and compare before the bundle is complete: `"full"`, `"sample"` or `"none"`.
        sha256: record the SHA-256 of every source file.
        base: a model or bundle; a tensor is stored as its difference from the base's tensor where that is smaller.
        progress: called with a `Progress` about ten times per second and at the end, on the calling thread.

    Ctrl-C or an exception in `progress` stops the work at the next tensor and is raised; finished files are kept for
    `resume=True`.

    Returns a report with the keys of `unweight compress --json`. Warns about each `config.json` that cannot be marked
    as a bundle's (`unmarked_configs`).

    Raises:
        ModelError: the model cannot be compressed.
        OutputExistsError: `output` exists and `force` is false.
        StorageError: reading or writing failed.
        ValueError, TypeError: an argument is invalid.
    """
    choice = _choice(profile, scope, code_limit, include, exclude, skip, plan_file, threads)
    more = {"resume": resume, "force": force, "verify": verify, "sha256": sha256}
    more |= {"ram_bytes": _ram(ram_bytes), "base": _path(base)}
    report = _native.compress(os.fsdecode(source), os.fsdecode(output), choice, more, _callback(progress))
    for config in report["unmarked_configs"]:
        warnings.warn(
            f"{config['name']} is copied unchanged ({config['reason']}): it does not mark the weights next to it as a "
            "bundle, so readers without bundle support would initialize random weights",
            stacklevel=2,
        )
    return report


def plan(
    source: Path,
    *,
    profile: str = "distribution",
    scope: Optional[str] = None,
    code_limit: Optional[int] = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    skip: Sequence[str] = (),
    plan_file: Optional[Path] = None,
    threads: Optional[int] = None,
) -> dict[str, Any]:
    """Predicts the result of `compress` with these arguments from headers and samples, without writing anything.

    Returns a report with the keys of `unweight plan --json`. Raises `ModelError`, `StorageError`, `ValueError` and
    `TypeError` as `compress`.
    """
    choice = _choice(profile, scope, code_limit, include, exclude, skip, plan_file, threads)
    return _native.plan(os.fsdecode(source), choice)


def decompress(
    bundle: Path,
    output: Path,
    *,
    threads: Optional[int] = None,
    ram_bytes: Optional[int] = None,
    resume: bool = False,
    force: bool = False,
    base: Optional[Path] = None,
    progress: Optional[Callback] = None,
) -> dict[str, Any]:
    """Restores the original files of a bundle in the directory `output`, byte for byte.

    `base` is the base of a bundle with one; `None` looks for it next to the bundle. The other arguments, and Ctrl-C,
    work as for `compress`. Returns a report with the keys of `unweight decompress --json`.

    Raises:
        NotABundleError, NewerVersionError, OldVersionError: `bundle` is not a bundle that this version reads.
        DamagedError: the bundle is damaged.
        OutputExistsError: `output` exists, and `force` is false or would lose other files.
        StorageError: reading or writing failed.
        ValueError, TypeError: an argument is invalid.
    """
    counts = {"threads": _count("threads", threads), "ram_bytes": _ram(ram_bytes)}
    more = {**counts, "resume": resume, "force": force, "base": _path(base)}
    return _native.decompress(os.fsdecode(bundle), os.fsdecode(output), more, _callback(progress))


def verify(
    bundle: Path,
    *,
    against: Optional[Path] = None,
    skip: Sequence[str] = (),
    quick: bool = False,
    threads: Optional[int] = None,
    ram_bytes: Optional[int] = None,
    key: Optional[str] = None,
    base: Optional[Path] = None,
    progress: Optional[Callback] = None,
) -> dict[str, Any]:
    """Checks every byte of a bundle, and returns a report with the keys of `unweight verify --json`.

    The report lists damage in `problems`, which is empty for an intact bundle. Only a bundle that cannot be checked at
    all raises an exception.

    Args:
        bundle: bundle directory.
        against: the source directory, to compare every file with it.
        skip: the patterns that `compress` was given as `skip`.
        quick: check only the manifest and names, sizes and headers of files, not the weights.
        threads: number of threads; `None` is all processors.
        ram_bytes: memory limit for tensors in work, in bytes; `None` is 1 GiB.
        key: text of the minisign public key that must have signed the manifest.
        base: the base of a bundle with one; `None` looks for it next to the bundle.
        progress: as for `compress`.
    """
    more = {
        "against": _path(against),
        "skip": _pattern_list("skip", skip),
        "quick": quick,
        "threads": _count("threads", threads),
        "ram_bytes": _ram(ram_bytes),
        "key": key,
        "base": _path(base),
    }
    return _native.verify(os.fsdecode(bundle), more, _callback(progress))


def inspect(bundle: Path) -> dict[str, Any]:
    """Returns a report on the tensors of a bundle, with the keys of `unweight inspect --json`.

    Raises the same errors as opening a `Bundle`.
    """
    return _native.Bundle(os.fsdecode(bundle))._inspect()
