//! The stock Python package opens a bundle, and a few lines of numpy decode a palette tensor from the specification
//! alone.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use unweight_format::bundle::{CompressOptions, Profile, Silent, compress};

use crate::common::{Scratch, real_model};

const SCRIPT: &str = r#"
import json, pathlib, sys
import numpy as np
from safetensors import safe_open

source, bundle = map(pathlib.Path, sys.argv[1:3])
weight_map = json.loads((bundle / "model.safetensors.index.json").read_text())["weight_map"]
names, decoded, compared = set(), 0, 0
for path in sorted(bundle.glob("*.safetensors")):
    original = (source / path.name).read_bytes()
    size = int.from_bytes(original[:8], "little")
    header, data = json.loads(original[8:8 + size]), original[8 + size:]
    with safe_open(path, framework="np") as file:
        assert file.metadata()["format"] == "unweight" and file.metadata()["unweight_version"] == "1.0"
        keys = set(file.keys())
        assert bytes(file.get_tensor("unweight.source_header")) == original[:8 + size]
        names |= {(key, path.name) for key in keys - {"unweight.source_header"}}
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            if name in keys:
                assert file.get_slice(name).get_shape() == entry["shape"], name
                compared += 1
                continue
            part = {k.rsplit(".", 1)[1]: file.get_tensor(k) for k in keys if k.startswith(name + ".unweight.")}
            assert part["tile_metadata"].dtype == np.uint32 and part["sign_mantissa"].dtype == np.uint8
            if "palette_index" not in part:
                assert part["encoded_exp"].dtype == np.uint32 and part["encoded_exp"].size % 4 == 0
                continue
            n, k = part["sign_mantissa"].shape
            packed = part["palette_index"]
            index = np.stack([packed & 15, packed >> 4], -1).reshape(-1, 64, 64)
            exponent = part["palette"][index]
            row = 0
            for tile, (_, offset, low, high) in enumerate(part["tile_metadata"].tolist()):
                assert offset == row
                for r in range(64):
                    if (low | high << 32) >> r & 1:
                        exponent[tile, r] = part["verbatim_exponents"][row]
                        row += 1
            rows, cols = -(-n // 64), -(-k // 64)
            exponent = exponent.reshape(rows, cols, 64, 64).swapaxes(1, 2).reshape(rows * 64, cols * 64)[:n, :k]
            sm = part["sign_mantissa"].astype(np.uint16)
            bits = (sm & 0x80) << 8 | exponent.astype(np.uint16) << 7 | sm & 0x7f
            assert bits.astype("<u2").tobytes() == data[begin:end], name
            decoded += 1
assert names == set(weight_map.items()), names ^ set(weight_map.items())
print(f"decoded {decoded} compared {compared}")
"#;

/// `UNWEIGHT_PYTHON`, or the interpreter of `target/test-venv`, which is created if it is missing.
fn python() -> PathBuf {
    if let Some(python) = std::env::var_os("UNWEIGHT_PYTHON") {
        return python.into();
    }
    let venv = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/test-venv");
    let python = venv.join("bin/python3");
    let works = |python: &Path| {
        Command::new(python).args(["-c", "import safetensors, numpy"]).output().is_ok_and(|o| o.status.success())
    };
    if !works(&python) {
        let made = Command::new("python3").args(["-m", "venv"]).arg(&venv).status().unwrap();
        assert!(
            made.success(),
            "python3 -m venv failed; set UNWEIGHT_PYTHON to an interpreter with safetensors and numpy"
        );
        let installed =
            Command::new(&python).args(["-m", "pip", "install", "-q", "safetensors", "numpy"]).status().unwrap();
        assert!(installed.success() && works(&python), "pip install safetensors numpy failed in {}", venv.display());
    }
    python
}

#[test]
fn the_stock_package_opens_every_profile() {
    let python = python();
    let scratch = Scratch::new();
    let source = real_model(&scratch);
    let script = scratch.path("check.py");
    fs::write(&script, SCRIPT).unwrap();
    for (profile, expected) in
        [(Profile::Palette, "decoded 1"), (Profile::Inference, "decoded"), (Profile::Distribution, "decoded 0")]
    {
        let bundle = scratch.path(profile.name());
        compress(&source, &bundle, &CompressOptions::new(profile), &Silent).unwrap();
        let output = Command::new(&python).arg(&script).arg(&source).arg(&bundle).output().unwrap();
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success() && out.contains(expected), "{profile}: {out} {err}");
    }
}
