"""Compares the stored sections of two trees of bundles: `same_sections.py OLD NEW`.

Of every .safetensors file below OLD, the file of the same name below NEW must have the same tensors and sections, byte for
byte. Header metadata and manifests may differ. Exits with 1 if a section differs or is missing.
"""

import json
import pathlib
import sys


def sections(path):
    """Name to (dtype, shape, bytes), or the whole file if it is not a sound safetensors file."""
    data = path.read_bytes()
    try:
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        header.pop("__metadata__", None)
        start = 8 + length
        return {
            name: (entry["dtype"], entry["shape"], data[start + entry["data_offsets"][0] : start + entry["data_offsets"][1]])
            for name, entry in header.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        return {"": data}


def main():
    old, new = map(pathlib.Path, sys.argv[1:])
    files = compared = 0
    different = []
    for path in sorted(old.rglob("*.safetensors")):
        name = path.relative_to(old)
        if not (new / name).exists():
            different.append(f"{name}: missing")
            continue
        before, after = sections(path), sections(new / name)
        files, compared = files + 1, compared + len(before)
        different += [f"{name}: {key}" for key in before.keys() | after.keys() if before.get(key) != after.get(key)]
    print(f"{files} files, {compared} sections, {len(different)} different")
    print(*different, sep="\n")
    sys.exit(bool(different) or not files)


main()
