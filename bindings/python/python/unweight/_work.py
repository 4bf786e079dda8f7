"""Models to bundles and back."""

from __future__ import annotations

import operator
import os
import warnings
from typing import Any, Callable, NamedTuple, Optional, Sequence, Union

from . import _native

Path = Union[str, bytes, "os.PathLike[str]"]


class Progress(NamedTuple):
    """How far the work is: what a callback is given."""

    done_bytes: int
    total_bytes: int
    """0 until it is known."""
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
        "include": _several("include", include),
        "exclude": _several("exclude", exclude),
        "skip": _several("skip", skip),
        "plan_file": None if plan_file is None else os.fsdecode(plan_file),
        "threads": _count("threads", threads),
    }


def _count(name: str, count: Optional[int]) -> Optional[int]:
    if count is None:
        return None
    if isinstance(count, bool) or not hasattr(count, "__index__"):
        raise TypeError(f"{name}={count!r}; give a whole number")
    if not 0 <= operator.index(count) < 2**64:
        raise ValueError(f"{name}={count!r}; give a number from 0 to 2**64 - 1")
    return operator.index(count)


def _ram(count: Optional[int]) -> Optional[int]:
    if _count("ram_bytes", count) == 0:
        raise ValueError("ram_bytes=0; give 1 or more, or None for 1 GiB")
    return _count("ram_bytes", count)


def _callback(progress: Optional[Callback]) -> Optional[Callback]:
    # Now, rather than when the work is done.
    if progress is not None and not callable(progress):
        raise TypeError(f"progress={progress!r}; give a function that takes a Progress")
    return progress


def _several(name: str, patterns: Sequence[str]) -> list[str]:
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
    progress: Optional[Callback] = None,
) -> dict[str, Any]:
    """Compresses a model directory to a bundle, which appears under its name when it is complete.

    `profile` is `"distribution"`, `"inference"`, `"palette"`, `"packed"` or `"compact"`; `scope` `"mlp"`, `"linear"`
    or `"all"`; `include`, `exclude` and `skip` are lists of patterns over names of tensors, and of files beside them.
    `verify` is what to decode again before the bundle gets its name: `"full"`, `"sample"` or `"none"`.

    `progress` is called about ten times a second, and at the end, on the calling thread. Ctrl-C, or an exception of the
    callback, stops the work at the next tensor and is raised; what is finished is kept for `resume=True`.

    Returns a report with the keys of `unweight compress --json`. A `config.json` that cannot say that the weights
    beside it are a bundle's (`unmarked_configs`) is warned of.
    """
    choice = _choice(profile, scope, code_limit, include, exclude, skip, plan_file, threads)
    more = {"resume": resume, "force": force, "verify": verify, "sha256": sha256}
    more["ram_bytes"] = _ram(ram_bytes)
    report = _native.compress(os.fsdecode(source), os.fsdecode(output), choice, more, _callback(progress))
    for config in report["unmarked_configs"]:
        warnings.warn(
            f"{config['name']} is copied as it is ({config['reason']}): it does not say that the weights beside it are "
            "a bundle's; readers that do not know bundles would make up weights",
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
    """Predicts what `compress` would do, from headers and samples; the keys of `unweight plan --json`."""
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
    progress: Optional[Callback] = None,
) -> dict[str, Any]:
    """Rebuilds the original files, byte for byte; the keys of `unweight decompress --json`.

    `progress` and Ctrl-C are as for `compress`.
    """
    counts = {"threads": _count("threads", threads), "ram_bytes": _ram(ram_bytes)}
    more = {**counts, "resume": resume, "force": force}
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
    progress: Optional[Callback] = None,
) -> dict[str, Any]:
    """Checks every byte of a bundle; the keys of `unweight verify --json`.

    Damage is in `problems`, which is empty for a sound bundle; only what cannot be checked at all is an exception.
    `against` is the directory that the bundle was made from, `key` the text of a minisign public key.
    """
    more = {
        "against": None if against is None else os.fsdecode(against),
        "skip": _several("skip", skip),
        "quick": quick,
        "threads": _count("threads", threads),
        "ram_bytes": _ram(ram_bytes),
        "key": key,
    }
    return _native.verify(os.fsdecode(bundle), more, _callback(progress))


def inspect(bundle: Path) -> dict[str, Any]:
    """What is in a bundle, tensor by tensor; the keys of `unweight inspect --json`."""
    return _native.Bundle(os.fsdecode(bundle))._inspect()
