//! Large tensors are decoded and written in pieces of whole tile rows.

use std::{
    fs,
    path::{Path, PathBuf},
};

use unweight_format::{
    Digest,
    bundle::{CompressOptions, DecompressOptions, Profile, Silent, compress, decompress},
};

use crate::{
    attacks::reseal,
    common::{Scratch, chain, read_tree, safetensors_file, tensor, weights},
};

/// Larger than two pieces of one thread; the first ends with a tile row of 33 rows and a tile column of 32 columns.
const SHAPES: [[usize; 2]; 2] = [[2081, 1056], [1088, 2048]];

fn model(dir: &Path) {
    fs::create_dir(dir).unwrap();
    let mut tensors = Vec::new();
    for (seed, shape @ [rows, cols]) in SHAPES.into_iter().enumerate() {
        let bytes = weights(rows * cols, seed as u64);
        tensors.push(tensor(&format!("bf16.{seed}.weight"), "BF16", &shape, &bytes));
        // The same bits as halves of other types: the exponents are others, the sizes of pieces too.
        tensors.push(tensor(&format!("f16.{seed}.weight"), "F16", &shape, &bytes));
        tensors.push(tensor(&format!("f32.{seed}.weight"), "F32", &[rows, cols / 2], &bytes));
    }
    fs::write(dir.join("model.safetensors"), safetensors_file(&[], &tensors)).unwrap();
}

fn bundle(scratch: &Scratch, profile: Profile) -> PathBuf {
    let (source, bundle) = (scratch.path("model"), scratch.path(&format!("{profile:?}")));
    if !source.exists() {
        model(&source);
    }
    compress(&source, &bundle, &CompressOptions::new(profile), &Silent).unwrap();
    bundle
}

#[test]
fn pieces_join_to_the_source() {
    let scratch = Scratch::new();
    for profile in [Profile::Distribution, Profile::Packed, Profile::Compact, Profile::Palette, Profile::Archive] {
        let bundle = bundle(&scratch, profile);
        for threads in [1, 3] {
            for ram in [None, Some(1 << 20)] {
                let back = scratch.path(&format!("{profile:?}-{threads}-{ram:?}"));
                let options = DecompressOptions::default().threads(Some(threads)).ram_bytes(ram);
                decompress(&bundle, &back, &options, &Silent).unwrap();
                assert!(
                    read_tree(&back) == read_tree(&scratch.path("model")),
                    "{profile:?}, {threads} threads, {ram:?}"
                );
                fs::remove_dir_all(back).unwrap();
            }
        }
    }
}

/// A manifest with another digest of a tensor is found after its last piece, and no output appears. A run that
/// continues decodes the tensor again: it is not taken over from the interrupted run.
#[test]
fn a_forged_digest_is_found_after_the_last_piece() {
    let scratch = Scratch::new();
    let bundle = bundle(&scratch, Profile::Distribution);
    let path = bundle.join("unweight.json");
    let sound = fs::read(&path).unwrap();
    let digest = Digest::of(&weights(SHAPES[1][0] * SHAPES[1][1], 1)).to_string();
    reseal(&bundle, |json| {
        let text = json.to_string();
        assert!(text.contains(&digest));
        *json = serde_json::from_str(&text.replace(&digest, &"1".repeat(32))).unwrap();
        // The digest of the file is that of its header's and tensors' digests.
        let file = &json["files"][0];
        let tensors = file["tensors"].as_array().unwrap().iter().map(|tensor| &tensor["digest"]);
        let digests = [&file["header_digest"]].into_iter().chain(tensors).map(|digest| digest.as_str().unwrap());
        json["files"][0]["digest"] = Digest::of(digests.collect::<String>().as_bytes()).to_string().into();
    });
    let back = scratch.path("back");
    let options = DecompressOptions::default().threads(Some(1));
    let error = chain(&decompress(&bundle, &back, &options, &Silent).unwrap_err());
    assert!(error.contains("model.safetensors") && error.contains("decoded") && error.contains(&digest), "{error}");
    assert!(!back.exists());
    fs::write(&path, &sound).unwrap();
    decompress(&bundle, &back, &options.resume(true), &Silent).unwrap();
    assert!(read_tree(&back) == read_tree(&scratch.path("model")));
}
