//! Parts of tensors, as ranks read them: the same weights, fewer bytes read, and every byte compared.

use std::{fs, ops::Range, os::unix::fs::FileExt, path::Path};

use unweight_format::{
    Digest,
    bundle::{Bundle, BundleError, CompressOptions, Profile, Silent, compress, manifest::TensorEntry, verify},
    testing::{Random, Weights},
};

use crate::common::{Scratch, safetensors_file, tensor};

const NAMES: [&str; 5] = ["wide", "tall", "small", "odd", "bias"];

/// Packed matrices with several blocks and with one, a matrix that cannot be packed, and a vector.
fn model(home: &Path) {
    let shapes: [&[usize]; 5] = [&[1088, 1856], &[2176, 640], &[320, 512], &[700, 900], &[96]];
    let bytes: Vec<Vec<u8>> = shapes
        .iter()
        .enumerate()
        .map(|(seed, shape)| {
            let mut bytes = Weights::TRAINED.bytes(shape.iter().product(), seed as u64);
            // Zeros are outside of every window, so there are lists of escapes, which must be sliced, too.
            let mut random = Random::new(seed as u64 + 7);
            for _ in 0..bytes.len() / 900 {
                let at = random.below(bytes.len() as u64 / 2) as usize * 2;
                bytes[at..at + 2].fill(0);
            }
            bytes
        })
        .collect();
    let tensors: Vec<_> =
        NAMES.iter().zip(shapes).zip(&bytes).map(|((name, shape), bytes)| tensor(name, "BF16", shape, bytes)).collect();
    fs::create_dir(home).unwrap();
    fs::write(home.join("model.safetensors"), safetensors_file(&[], &tensors)).unwrap();
}

fn made(scratch: &Scratch, profile: Profile) -> std::path::PathBuf {
    let (source, out) = (scratch.path("model"), scratch.path(profile.name()));
    if !source.exists() {
        model(&source);
    }
    compress(&source, &out, &CompressOptions::new(profile), &Silent).unwrap();
    out
}

fn entry<'a>(bundle: &'a Bundle, name: &str) -> &'a TensorEntry {
    bundle.tensor(name).unwrap().entry()
}

/// The byte range of a section in the only shard.
fn byte_range(bundle: &Path, name: &str) -> Range<u64> {
    let shard = fs::read(bundle.join("model.safetensors")).unwrap();
    let header = u64::from_le_bytes(shard[..8].try_into().unwrap());
    let json: serde_json::Value = serde_json::from_slice(&shard[8..8 + header as usize]).unwrap();
    let at = |i: usize| 8 + header + json[name]["data_offsets"][i].as_u64().unwrap();
    at(0)..at(1)
}

#[test]
fn slices_equal_the_weights_and_read_only_what_they_need() {
    let scratch = Scratch::new();
    for profile in [Profile::Packed, Profile::Distribution] {
        let bundle = Bundle::open_weights(&made(&scratch, profile)).unwrap();
        let mut random = Random::new(3);
        for name in &NAMES[..4] {
            let (shape, stored) = (entry(&bundle, name).shape.clone(), entry(&bundle, name).stored_bytes());
            let whole = bundle.tensor(name).unwrap().decode().unwrap();
            let has_blocks = profile == Profile::Packed && ["wide", "tall"].contains(name);
            let mut any = |of: usize| {
                let start = random.below(of as u64) as usize;
                start..start + 1 + random.below((of - start) as u64) as usize
            };
            let halves = |of: usize| [0..of / 2, of / 2..of];
            let mut cuts: Vec<_> = (0..24).map(|_| (any(shape[0]), any(shape[1]))).collect();
            cuts.extend(halves(shape[0]).map(|rows| (rows, 0..shape[1])));
            cuts.extend(halves(shape[1]).map(|cols| (0..shape[0], cols)));
            cuts.push((0..shape[0], 0..shape[1]));
            let mut min_read = u64::MAX;
            for (rows, cols) in cuts {
                let part = bundle.tensor(name).unwrap().decode_part(rows.clone(), cols.clone()).unwrap();
                let row = |row: usize| &whole[2 * (row * shape[1] + cols.start)..2 * (row * shape[1] + cols.end)];
                assert!(
                    part.bytes == rows.clone().flat_map(row).copied().collect::<Vec<_>>(),
                    "{name} {rows:?} {cols:?}"
                );
                assert!(part.read_bytes <= stored);
                let of_file = bundle.tensor_in("model.safetensors", name).unwrap();
                assert_eq!(of_file.decode_part(rows, cols).unwrap(), part);
                min_read = min_read.min(part.read_bytes);
            }
            assert_eq!(min_read < stored, has_blocks, "{name}: {min_read} of {stored} bytes");
        }
        // Half of the rows is half of the tiles; both halves read the block in the middle.
        if profile == Profile::Packed {
            let stored = entry(&bundle, "tall").stored_bytes();
            let tall = bundle.tensor("tall").unwrap();
            let read = [0..1088, 1088..2176].map(|rows| tall.decode_part(rows, 0..tall.shape()[1]).unwrap().read_bytes);
            assert!(read.iter().all(|bytes| bytes * 10 < stored * 8), "{read:?} of {stored}");
        }
    }
}

#[test]
fn invalid_slices_are_rejected_by_name() {
    let scratch = Scratch::new();
    let bundle = Bundle::open_weights(&made(&scratch, Profile::Packed)).unwrap();
    for (rows, cols) in [(0..0, 0..64), (0..64, 640..641), (2176..2177, 0..64), (0..2177, 0..640), (70..70, 0..64)] {
        let error = bundle.tensor("tall").unwrap().decode_part(rows.clone(), cols).unwrap_err();
        assert!(matches!(error, BundleError::PartOutside { .. }), "{rows:?}: {error}");
        assert!(error.to_string().contains("model.safetensors: tensor 'tall' has"), "{error}");
    }
    let error = bundle.tensor("bias").unwrap().decode_part(0..1, 0..1).unwrap_err();
    assert!(matches!(error, BundleError::PartOfNoMatrix { .. }), "{error}");
    assert!(matches!(bundle.tensor("nothing"), Err(BundleError::UnknownTensor { .. })));
}

#[test]
fn slices_detect_only_damage_that_they_read() {
    let scratch = Scratch::new();
    let out = made(&scratch, Profile::Packed);
    let packed = byte_range(&out, "wide.unweight.packed");
    // 29 tiles per row: the first byte of tile (9, 9), in block (1, 1).
    let at = packed.start + (9 * 29 + 9) * 6144;
    let shard = fs::File::options().read(true).write(true).open(out.join("model.safetensors")).unwrap();
    let mut byte = [0];
    shard.read_exact_at(&mut byte, at).unwrap();
    shard.write_all_at(&[byte[0] ^ 4], at).unwrap();
    let bundle = Bundle::open_weights(&out).unwrap();
    for (rows, cols, sound) in [
        (0..512, 0..1856, true),
        (1024..1088, 0..1856, true),
        (0..1088, 0..512, true),
        (0..1088, 1024..1856, true),
        (512..576, 512..576, false),
        (0..1088, 1000..1856, false),
        (0..513, 0..1856, false),
    ] {
        let part = bundle.tensor("wide").unwrap().decode_part(rows.clone(), cols.clone());
        assert_eq!(part.is_ok(), sound, "{rows:?} {cols:?}");
        if let Err(error) = part {
            assert!(
                matches!(&error, BundleError::Mismatch { tensor: Some(tensor), what, .. }
                    if &**tensor == "wide" && what.contains("'wide', section packed, block 5")),
                "{error}"
            );
        }
    }
    assert!(bundle.tensor("wide").unwrap().decode().is_err() && bundle.tensor("tall").unwrap().decode().is_ok());
}

/// Changes the digests of blocks, and then the manifest's digest.
fn with_blocks(bundle: &Path, change: impl Fn(&mut serde_json::Map<String, serde_json::Value>)) {
    let path = bundle.join("unweight.json");
    let mut json: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let mut changed = 0;
    for tensor in json["files"][0]["tensors"].as_array_mut().unwrap() {
        let Some(sections) = tensor.get_mut("sections") else { continue };
        for section in sections.as_array_mut().unwrap() {
            let section = section.as_object_mut().unwrap();
            if section.contains_key("blocks") {
                change(section);
                changed += 1;
            }
        }
    }
    assert_eq!(changed, 2);
    json["manifest_digest"] = "0".repeat(32).into();
    let text = json.to_string();
    let key = |digits: &str| format!("\"manifest_digest\":\"{digits}\"");
    fs::write(path, text.replace(&key(&"0".repeat(32)), &key(&Digest::of(text.as_bytes()).to_string()))).unwrap();
}

#[test]
fn bundles_without_block_digests_are_refused() {
    let scratch = Scratch::new();
    let out = made(&scratch, Profile::Packed);
    with_blocks(&out, |section| _ = section.remove("blocks"));
    let error = Bundle::open_weights(&out).unwrap_err();
    assert!(error.to_string().contains("blocks with digests, but lists 0"), "{error}");
}

#[test]
fn wrong_block_digests_are_detected() {
    let scratch = Scratch::new();
    let out = made(&scratch, Profile::Packed);
    let manifest = fs::read(out.join("unweight.json")).unwrap();
    with_blocks(&out, |section| {
        let digits = section["blocks"].as_str().unwrap();
        let other = if digits.starts_with('0') { "1" } else { "0" };
        section["blocks"] = format!("{other}{}", &digits[1..]).into();
    });
    let report = verify(&out, None, &Silent).unwrap();
    let problems: Vec<_> = report.problems.iter().map(|problem| problem.message.as_str()).collect();
    assert!(problems.len() == 2 && problems.iter().all(|message| message.contains("block 0")), "{problems:?}");
    for digits in ["0".repeat(32), "0".repeat(31), "x".repeat(32 * 12)] {
        fs::write(out.join("unweight.json"), &manifest).unwrap();
        with_blocks(&out, |section| section["blocks"] = digits.clone().into());
        assert!(matches!(Bundle::open_weights(&out), Err(BundleError::Manifest { .. })), "{digits}");
    }
}
