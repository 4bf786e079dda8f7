//! The golden files of `tests/golden`: the exact bytes that this version writes, and files that every version must
//! refuse.
//!
//! `cargo test -p unweight-format --test format -- --ignored golden` rewrites them; review the difference before
//! committing it.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use unweight_format::{
    Digest, EncodingId, Float, Matrix,
    bundle::{Bundle, BundleError, CompressOptions, DecompressOptions, Profile, Silent, compress, decompress, verify},
    raw::{
        CompactTensor, ExponentsTensor, HuffmanTensor, PackedTensor, PaletteTensor, RansTensor, Section, TileMetadata,
        huffman, oracle,
    },
    safetensors::{Header, SOURCE_HEADER_MAX},
    testing::{Random, float_weights},
};

use crate::common::{Scratch, chain, header, read_tree, safetensors_file, small_model, tensor, weights};

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden")
}

const VALID: [(&str, Profile); 6] = [
    ("single", Profile::Distribution),
    ("sharded", Profile::Inference),
    ("packed", Profile::Packed),
    ("compact", Profile::Compact),
    ("floats", Profile::Distribution),
    ("archive", Profile::Archive),
];

/// Names and messages of a directory's cases, from `cases.tsv`.
fn cases(folder: &str) -> Vec<(String, String)> {
    let table = fs::read_to_string(golden().join("cases.tsv")).unwrap();
    let case = |line: &str| {
        let [case_folder, name, _why, message] = line.split('\t').collect::<Vec<_>>()[..] else { panic!("{line}") };
        (case_folder == folder).then(|| (name.to_owned(), message.to_owned()))
    };
    table.lines().filter_map(case).collect()
}

#[test]
fn valid_models_give_the_golden_bytes_and_round_trip() {
    for (name, profile) in VALID {
        let scratch = Scratch::new();
        let (source, expected) =
            (golden().join("valid").join(name).join("source"), golden().join("valid").join(name).join("bundle"));
        let (bundle, back) = (scratch.path("bundle"), scratch.path("back"));
        compress(&source, &bundle, &CompressOptions::new(profile), &Silent).unwrap();
        let (mut got, mut want) = (read_tree(&bundle), read_tree(&expected));
        // The manifest contains the program's version; everything else in it must be the same.
        let manifest = |files: &mut std::collections::BTreeMap<String, Vec<u8>>| {
            let mut manifest: serde_json::Value =
                serde_json::from_slice(&files.remove("unweight.json").unwrap()).unwrap();
            manifest["creator"] = "".into();
            manifest["manifest_digest"] = "".into();
            manifest
        };
        assert_eq!(manifest(&mut got), manifest(&mut want), "{name}");
        assert!(got == want, "{name}: the encoder gives other bytes");
        assert!(verify(&expected, Some(&source), &Silent).unwrap().is_ok(), "{name}");
        decompress(&expected, &back, &DecompressOptions::default(), &Silent).unwrap();
        assert!(read_tree(&back) == read_tree(&source), "{name}");
        // The slow decoder must read the stored bytes, too.
        let open = Bundle::open(&expected).unwrap();
        for t in open.tensors() {
            let tensor = t.stored().unwrap();
            let bytes = match tensor.encoding() {
                EncodingId::RAW => tensor.section(Section::RAW).unwrap().to_vec(),
                EncodingId::HUFFMAN => oracle::decode_huffman(&HuffmanTensor::of(tensor).unwrap()).unwrap(),
                EncodingId::PALETTE => oracle::decode_palette(&PaletteTensor::of(tensor).unwrap()),
                EncodingId::PACKED => oracle::unpack(&PackedTensor::of(tensor).unwrap()),
                EncodingId::COMPACT => oracle::decode_compact(&CompactTensor::of(tensor).unwrap()).unwrap(),
                EncodingId::EXPONENTS => oracle::decode_exponents(&ExponentsTensor::of(tensor).unwrap()).unwrap(),
                EncodingId::RANS => oracle::decode_rans(&RansTensor::of(tensor).unwrap()).unwrap(),
                other => panic!("no oracle for {other}"),
            };
            assert_eq!(Digest::of(&bytes), t.entry().digest, "{name}: {}", t.entry().name);
        }
    }
}

/// `valid/delta` has a source, its base and the bundle next to it.
#[test]
fn differences_give_the_golden_bytes_and_come_back() {
    let (scratch, dir) = (Scratch::new(), golden().join("valid/delta"));
    let options = CompressOptions::default().base(dir.join("base"));
    compress(&dir.join("source"), &scratch.path("bundle"), &options, &Silent).unwrap();
    let (mut got, mut want) = (read_tree(&scratch.path("bundle")), read_tree(&dir.join("bundle")));
    let files = |tree: &mut std::collections::BTreeMap<String, Vec<u8>>| {
        let manifest: serde_json::Value = serde_json::from_slice(&tree.remove("unweight.json").unwrap()).unwrap();
        (manifest["base"].clone(), manifest["files"].clone())
    };
    assert_eq!(files(&mut got), files(&mut want));
    assert!(got == want, "the encoder gives other bytes");
    // The base is found next to the bundle.
    decompress(&dir.join("bundle"), &scratch.path("back"), &DecompressOptions::default(), &Silent).unwrap();
    assert!(read_tree(&scratch.path("back")) == read_tree(&dir.join("source")));
    let open = Bundle::open_with_base(&dir.join("bundle"), None).unwrap();
    let encodings: Vec<EncodingId> = open.tensors().map(|tensor| tensor.encoding()).collect();
    assert_eq!(encodings, [EncodingId::PLANES, EncodingId::PLANES, EncodingId::HUFFMAN]);
}

#[test]
fn bundles_of_development_versions_are_refused_with_their_message() {
    let rows = cases("development");
    let dir = golden().join("development");
    assert_eq!(rows.len(), fs::read_dir(&dir).unwrap().count(), "every version is explained");
    for (version, message) in rows {
        let error = Bundle::open(&dir.join(&version)).unwrap_err();
        let found = matches!(&error, BundleError::OldVersion { version: found, .. } if found.to_string() == version);
        assert!(found && error.to_string().contains(&message), "{version}: {error}");
        assert!(error.to_string().contains("compress the model again"), "{error}");
    }
}

/// The files of a bundle that this program cannot read are not known to belong to the bundle: force does not replace
/// them, and the error explains why.
#[test]
fn bundles_of_development_versions_are_not_replaced_by_force() {
    let scratch = Scratch::new();
    let (source, out) = (scratch.path("model"), scratch.path("out"));
    small_model(&source);
    fs::create_dir(&out).unwrap();
    let manifest = fs::read(golden().join("development/1.4/unweight.json")).unwrap();
    fs::write(out.join("unweight.json"), &manifest).unwrap();
    let error = compress(&source, &out, &CompressOptions::default().force(true), &Silent).unwrap_err();
    assert_eq!(error.code(), "output-not-replaceable");
    assert!(error.to_string().contains("format version 1.4 of a development version"), "{error}");
    assert_eq!(fs::read(out.join("unweight.json")).unwrap(), manifest);
}

/// Digest of all names and bytes of `released/1.0`. Files never change once their version is published.
const RELEASED_1_0: &str = "e1a1a88cdf0eea9d9d5d52c67daf30d4";

#[test]
fn bundles_of_released_versions_open_for_ever() {
    let dir = golden().join("released/1.0");
    let mut all = Vec::new();
    for (name, bytes) in read_tree(&dir) {
        all.extend_from_slice(format!("{name} {} ", bytes.len()).as_bytes());
        all.extend_from_slice(&bytes);
    }
    assert_eq!(Digest::of(&all).to_string(), RELEASED_1_0, "tests/golden/released is never rewritten");
    let mut encodings = BTreeSet::new();
    for entry in fs::read_dir(dir).unwrap() {
        let (mut bundle, scratch) = (entry.unwrap().path(), Scratch::new());
        // A difference has its base next to it.
        if bundle.join("base").is_dir() {
            bundle.push("bundle");
        }
        assert!(verify(&bundle, None, &Silent).unwrap().is_ok(), "{}", bundle.display());
        // Decompression compares every digest of the source.
        decompress(&bundle, &scratch.path("back"), &DecompressOptions::default(), &Silent).unwrap();
        for tensor in Bundle::open_with_base(&bundle, None).unwrap().tensors() {
            tensor.decode().unwrap();
            encodings.insert(tensor.encoding().to_string());
        }
    }
    let all = ["compact", "exponents", "huffman", "packed", "palette", "planes", "rans", "raw"];
    assert_eq!(encodings, all.map(str::to_owned).into(), "every encoding of 1.0 has a released bundle");
}

#[test]
fn bundles_of_newer_versions_are_read_or_refused_by_name() {
    let dir = golden().join("newer");
    let rows = cases("newer");
    assert_eq!(rows.len(), fs::read_dir(&dir).unwrap().count(), "every bundle is explained");
    for (name, message) in rows {
        let (bundle, version) = (dir.join(&name), name.split('-').next().unwrap());
        if message == "opens" {
            let open = Bundle::open(&bundle).unwrap();
            assert_eq!(open.manifest().version.to_string(), version);
            let scratch = Scratch::new();
            assert!(verify(&bundle, None, &Silent).unwrap().is_ok(), "{name}");
            decompress(&bundle, &scratch.path("back"), &DecompressOptions::default(), &Silent).unwrap();
            continue;
        }
        let error = Bundle::open(&bundle).unwrap_err();
        assert_eq!(error.code(), "unsupported-format-version", "{name}: {error}");
        let text = error.to_string();
        assert!(text.contains(&message) && text.contains("update the program"), "{name}: {text}");
        assert!(message.contains(version), "{name}");
    }
}

#[test]
fn invalid_headers_are_rejected_with_their_message() {
    let rows = cases("invalid/headers");
    let files = read_tree(&golden().join("invalid/headers"));
    assert_eq!(rows.len(), files.len(), "every file is explained");
    for (name, message) in rows {
        let bytes = &files[&name];
        let error = Header::parse(bytes, bytes.len() as u64, SOURCE_HEADER_MAX).unwrap_err().to_string();
        assert!(error.contains(&message), "{name}: {error}");
    }
}

#[test]
fn invalid_streams_are_rejected_with_their_message() {
    let rows = cases("invalid/streams");
    let dir = golden().join("invalid/streams");
    assert_eq!(rows.len(), fs::read_dir(&dir).unwrap().count(), "every stream is explained");
    for (name, message) in rows {
        // The digests are correct: only the codec can detect the fault.
        let report = verify(&dir.join(&name), None, &Silent).unwrap();
        assert_eq!(report.problems.len(), 1, "{name}: {:?}", report.problems);
        let problem = &report.problems[0];
        assert!(problem.message.contains(&message), "{name}: {}", problem.message);
        assert_eq!(problem.tensor.as_deref(), Some("t"));
        let out = Scratch::new();
        let error = decompress(&dir.join(&name), &out.path("out"), &DecompressOptions::default(), &Silent).unwrap_err();
        assert!(chain(&error).contains(&message), "{name}: {}", chain(&error));
    }
}

/// 70 x 130 elements with some exponents outside the palette: edge tiles, pad rows, verbatim rows.
fn edge_weights() -> Vec<u8> {
    let mut bytes = weights(70 * 130, 11);
    for (i, at) in (0..bytes.len()).step_by(3502).enumerate() {
        bytes[at..at + 2].copy_from_slice(&[0x0000u16, 0x8000, 0x7fc1, 0x0001, 0xff80, 0x7f80][i % 6].to_le_bytes());
    }
    bytes
}

/// Weights with some zeros, subnormals, infinities and NaN: single ones and several in a row block.
fn escaping_weights(elements: usize) -> Vec<u8> {
    let mut bytes = weights(elements, 14);
    for (i, at) in [5, 700, 2100, 2101, 2900, 4500, 6000].into_iter().enumerate() {
        let bits = [0x0000u16, 0x8000, 0x7fc1, 0x0001, 0xff80, 0x7f80, 0x807f][i];
        bytes[2 * at..2 * at + 2].copy_from_slice(&bits.to_le_bytes());
    }
    bytes
}

/// Weights whose exponents rise with row and column.
fn scaled_weights(rows: usize, cols: usize) -> Vec<u8> {
    let mut bytes = weights(rows * cols, 24);
    for (i, element) in bytes.as_chunks_mut::<2>().0.iter_mut().enumerate() {
        let raised = u16::from_le_bytes(*element) + ((i / cols % 3 + i % cols / 50) << 7) as u16;
        *element = raised.to_le_bytes();
    }
    bytes
}

#[test]
#[ignore = "rewrites the golden files"]
fn regenerate() {
    let put = |path: PathBuf, bytes: &[u8]| {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    };
    for part in ["valid", "invalid"] {
        _ = fs::remove_dir_all(golden().join(part));
    }
    let single = golden().join("valid/single/source");
    let t = tensor("t", "BF16", &[70, 130], &edge_weights());
    let bias = tensor("bias", "BF16", &[3], &weights(3, 12));
    let ids = tensor("ids", "I64", &[2], &[1; 16]);
    put(single.join("model.safetensors"), &safetensors_file(&[("format", "pt")], &[t, bias, ids]));
    put(single.join("config.json"), b"{\n  \"rms_norm_eps\": 1.0e-05,\n  \"architectures\": [\"\\u0041\"]\n}\n");
    let sharded = golden().join("valid/sharded/source");
    let mut map = serde_json::Map::new();
    for layer in 0..3 {
        let name = format!("model-{:05}-of-00003.safetensors", layer + 1);
        let tensors: Vec<_> = ["gate", "up", "down"]
            .iter()
            .enumerate()
            .map(|(i, part)| {
                let tensor_name = format!("model.layers.{layer}.mlp.{part}_proj.weight");
                map.insert(tensor_name.clone(), name.clone().into());
                tensor(&tensor_name, "BF16", &[64, 32], &weights(64 * 32, layer * 3 + i as u64))
            })
            .collect();
        put(sharded.join(&name), &safetensors_file(&[], &tensors));
    }
    let index = serde_json::json!({ "metadata": { "total_size": 3 * 3 * 64 * 32 * 2 }, "weight_map": map });
    put(sharded.join("model.safetensors.index.json"), index.to_string().as_bytes());
    let packed = golden().join("valid/packed/source");
    put(
        packed.join("model.safetensors"),
        &safetensors_file(
            &[],
            &[
                tensor("packed", "BF16", &[128, 64], &escaping_weights(128 * 64)),
                tensor("odd", "BF16", &[70, 130], &weights(70 * 130, 15)),
                tensor("zeros", "BF16", &[64, 64], &[0; 8192]),
                tensor("blocks", "BF16", &[576, 64], &weights(576 * 64, 17)),
            ],
        ),
    );
    let compact = golden().join("valid/compact/source");
    put(
        compact.join("model.safetensors"),
        &safetensors_file(
            &[],
            &[
                tensor("compact", "BF16", &[128, 256], &escaping_weights(128 * 256)),
                tensor("odd", "BF16", &[70, 130], &weights(70 * 130, 15)),
                tensor("noise", "BF16", &[64, 64], &Random::new(16).bytes(8192)),
            ],
        ),
    );
    let floats = golden().join("valid/floats/source");
    let of = |name: &str, float: Float, dtype: &str, shape: [usize; 2], seed| {
        let elements = shape[0] * shape[1];
        let mut bytes = float_weights(float, elements, seed);
        // Random bits in some elements, including zeros, subnormals, infinities and NaN.
        let mut random = Random::new(seed ^ 1);
        for element in bytes.chunks_exact_mut(float.bytes()).step_by(701) {
            element.copy_from_slice(&(random.bits() as u32).to_le_bytes()[..float.bytes()]);
        }
        tensor(name, dtype, &shape, &bytes)
    };
    put(
        floats.join("model.safetensors"),
        &safetensors_file(
            &[],
            &[
                of("e4m3", Float::E4M3, "F8_E4M3", [144, 192], 18),
                of("e4m3.scale", Float::F32, "F32", [2, 2], 19),
                of("e5m2", Float::E5M2, "F8_E5M2", [131, 187], 20),
                of("f16", Float::F16, "F16", [70, 190], 21),
                of("f32", Float::F32, "F32", [70, 130], 22),
            ],
        ),
    );
    let archive = golden().join("valid/archive/source");
    put(
        archive.join("model.safetensors"),
        &safetensors_file(
            &[],
            &[
                tensor("classes", "BF16", &[96, 200], &scaled_weights(96, 200)),
                tensor("edges", "BF16", &[70, 131], &[edge_weights(), weights(70, 18)].concat()),
                of("e4m3", Float::E4M3, "F8_E4M3", [128, 64], 23),
                tensor("noise", "BF16", &[64, 64], &Random::new(16).bytes(8192)),
            ],
        ),
    );
    for (name, profile) in VALID {
        let dir = golden().join("valid").join(name);
        compress(&dir.join("source"), &dir.join("bundle"), &CompressOptions::new(profile), &Silent).unwrap();
    }

    let delta = golden().join("valid/delta");
    let first = weights(70 * 130, 25);
    let second: Vec<u8> = first.iter().enumerate().map(|(i, byte)| byte ^ u8::from(i % 14 == 0)).collect();
    let float = |seed| of("float", Float::F32, "F32", [70, 40], seed);
    let t = |bytes: &[u8]| tensor("t", "BF16", &[70, 130], bytes);
    let new = tensor("new", "BF16", &[70, 130], &weights(70 * 130, 27));
    put(delta.join("base/model.safetensors"), &safetensors_file(&[], &[t(&first), float(26)]));
    put(delta.join("source/model.safetensors"), &safetensors_file(&[], &[t(&second), float(26), new]));
    let options = CompressOptions::default().base(delta.join("base"));
    compress(&delta.join("source"), &delta.join("bundle"), &options, &Silent).unwrap();

    let headers = golden().join("invalid/headers");
    let raw = |json: &str, data: usize| {
        let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(json.as_bytes());
        bytes.resize(bytes.len() + data, 0);
        bytes
    };
    let one = |dtype: &str, shape: &str, offsets: &str| {
        format!(r#"{{"t":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}"#)
    };
    let two = |a: &str, b: &str| {
        format!(
            r#"{{"a":{{"dtype":"U8","shape":[2],"data_offsets":{a}}},"b":{{"dtype":"U8","shape":[2],"data_offsets":{b}}}}}"#
        )
    };
    for (name, bytes) in [
        ("no-length", vec![1, 0, 0]),
        ("huge-length", vec![0xff; 16]),
        ("cut-header", raw("{}", 0)[..9].to_vec()),
        ("not-json", raw("{]", 0)),
        ("not-utf8", [&raw(r#"{"__metadata__":{"a":""}}"#, 0)[..31], &[0xff, b'"', b'}', b'}']].concat()),
        ("name-twice", raw(&two("[0,2]", "[2,4]").replace("\"b\"", "\"a\""), 4)),
        ("unknown-dtype", raw(&one("BF17", "[1]", "[0,2]"), 2)),
        ("wrong-bytes", raw(&one("BF16", "[4]", "[0,6]"), 6)),
        ("uncountable", raw(&one("BF16", "[4294967296,4294967296]", "[0,8]"), 8)),
        ("half-a-byte", raw(&one("F4", "[3]", "[0,2]"), 2)),
        ("backwards", raw(&one("U8", "[2]", "[2,0]"), 2)),
        ("hole", raw(&two("[0,2]", "[3,5]"), 5)),
        ("overlap", raw(&two("[0,2]", "[1,3]"), 3)),
        ("late-start", raw(&two("[1,3]", "[3,5]"), 5)),
        ("truncated-data", raw(&two("[0,2]", "[2,4]"), 3)),
        ("trailing-data", raw(&two("[0,2]", "[2,4]"), 5)),
    ] {
        put(headers.join(format!("{name}.safetensors")), &bytes);
    }

    // Streams with sections of `t` changed, and correct digests.
    let scratch = Scratch::new();
    put(scratch.path("m/t.safetensors"), &safetensors_file(&[], &[tensor("t", "BF16", &[70, 130], &edge_weights())]));
    // Padded to whole tiles, the first matrix would not shrink as palette indices.
    put(
        scratch.path("p/t.safetensors"),
        &safetensors_file(&[], &[tensor("t", "BF16", &[128, 64], &weights(8192, 13))]),
    );
    put(
        scratch.path("c/t.safetensors"),
        &safetensors_file(&[], &[tensor("t", "BF16", &[128, 256], &escaping_weights(128 * 256))]),
    );
    put(
        scratch.path("a/t.safetensors"),
        &safetensors_file(&[], &[tensor("t", "BF16", &[95, 201], &scaled_weights(95, 201))]),
    );
    put(scratch.path("f/t.safetensors"), &safetensors_file(&[], &[of("t", Float::F16, "F16", [70, 190], 21)]));
    put(
        scratch.path("r/t.safetensors"),
        &safetensors_file(&[], &[tensor("t", "BF16", &[128, 64], &escaping_weights(128 * 64))]),
    );
    // The coded encoding: the profile's own, or the exponents of another type.
    const FLOATS: Profile = Profile::Inference;
    type Change = fn(Section, &mut [u8]);
    let streams: [(&str, Profile, Change); 38] = [
        ("start-word", Profile::Distribution, |s, b| {
            if s == Section::TILE_METADATA {
                b[TileMetadata::BYTES] ^= 1
            }
        }),
        ("verbatim-offset", Profile::Distribution, |s, b| {
            if s == Section::TILE_METADATA {
                b[2 * TileMetadata::BYTES + 4] ^= 1
            }
        }),
        ("pad-row-verbatim", Profile::Distribution, |s, b| {
            if s == Section::TILE_METADATA {
                b[3 * TileMetadata::BYTES + 15] ^= 0x80
            }
        }),
        ("pad-row-coded", Profile::Distribution, |s, b| {
            if s == Section::ROW_LENGTHS {
                b[3 * 64 + 63] = 1
            }
        }),
        ("palette-twice", Profile::Distribution, |s, b| {
            if s == Section::PALETTE {
                b[1] = b[0]
            }
        }),
        ("incomplete-code", Profile::Distribution, |s, b| {
            if s == Section::CODE_LENGTHS {
                b[15] += 1
            }
        }),
        ("decreasing-lengths", Profile::Distribution, |s, b| {
            if s == Section::CODE_LENGTHS {
                b.swap(0, 15)
            }
        }),
        ("row-length", Profile::Distribution, |s, b| {
            if s == Section::ROW_LENGTHS {
                // The number of the tile's bits does not change.
                let first = (0..64).find(|&row| b[row] > 0).unwrap();
                let last = (0..64).rfind(|&row| b[row] > 0).unwrap();
                b[first] += 1;
                b[last] -= 1;
            }
        }),
        ("palette-start-word", Profile::Palette, |s, b| {
            if s == Section::TILE_METADATA {
                b[0] = 1
            }
        }),
        ("packed-window", Profile::Packed, |s, b| {
            if s == Section::PACKED_WINDOW {
                b[0] = 240
            }
        }),
        ("packed-head", Profile::Packed, |s, b| {
            if s == Section::ESCAPE_HEADS {
                // Changes the kind of the first list's head.
                let list = b.chunks_exact(4).position(|head| head[3] & 0x80 != 0).unwrap();
                b[4 * list + 3] = 0;
                b[4 * list] = 9;
            }
        }),
        ("packed-list-index", Profile::Packed, |s, b| {
            if s == Section::ESCAPE_HEADS {
                let list = b.chunks_exact(4).position(|head| head[3] & 0x80 != 0).unwrap();
                b[4 * list] ^= 1;
            }
        }),
        ("packed-list-length", Profile::Packed, |s, b| {
            if s == Section::ESCAPES {
                b[3] = 0x7f
            }
        }),
        ("packed-order", Profile::Packed, |s, b| {
            if s == Section::ESCAPES {
                b[4..12].rotate_left(4)
            }
        }),
        ("packed-place", Profile::Packed, |s, b| {
            if s == Section::ESCAPE_HEADS {
                // Moves a single record to the next lane.
                let one = b.chunks_exact(4).position(|head| head[3] & 0xc0 == 0x40).unwrap();
                b[4 * one + 2] ^= 1;
            }
        }),
        ("packed-padding", Profile::Packed, |s, b| {
            if s == Section::ESCAPES {
                *b.last_mut().unwrap() = 1
            }
        }),
        ("compact-window", Profile::Compact, |s, b| {
            if s == Section::CLASS_WINDOW {
                b[0] = 224
            }
        }),
        ("compact-book", Profile::Compact, |s, b| {
            if s == Section::CLASS_BOOK {
                // Shortens a code by one bit.
                b[1] -= 0x10
            }
        }),
        ("compact-start", Profile::Compact, |s, b| {
            if s == Section::CLASS_TILES {
                b[8] ^= 1
            }
        }),
        ("compact-head", Profile::Compact, |s, b| {
            if s == Section::CLASS_TILES {
                b[4..8].copy_from_slice(&[9, 0, 0, 0])
            }
        }),
        ("compact-list-length", Profile::Compact, |s, b| {
            if s == Section::CLASS_ESCAPES {
                b[3] = 0x7f
            }
        }),
        ("compact-order", Profile::Compact, |s, b| {
            if s == Section::CLASS_ESCAPES {
                b[4..12].rotate_left(4)
            }
        }),
        ("compact-lane", Profile::Compact, |s, b| {
            if s == Section::CLASS_STREAMS {
                // A lane that its codes do not fill; the tile still ends at the right bit.
                let longest = (0..32).max_by_key(|&lane| b[lane]).unwrap();
                let shortest = (0..32).min_by_key(|&lane| b[lane]).unwrap();
                b[longest] += 9;
                b[shortest] -= 9;
            }
        }),
        ("compact-end", Profile::Compact, |s, b| {
            if s == Section::CLASS_TILES {
                b[64] ^= 1
            }
        }),
        ("rans-symbols", Profile::Archive, |s, b| {
            if s == Section::RANS_MODEL {
                b[0] = 255
            }
        }),
        ("rans-tables", Profile::Archive, |s, b| {
            if s == Section::RANS_MODEL {
                b[4] ^= 1
            }
        }),
        ("rans-frequencies", Profile::Archive, |s, b| {
            if s == Section::RANS_MODEL {
                b[16..].fill(0xff)
            }
        }),
        ("rans-words", Profile::Archive, |s, b| {
            if s == Section::RANS_STREAMS {
                b[3] = 1
            }
        }),
        ("rans-state", Profile::Archive, |s, b| {
            if s == Section::RANS_STREAMS {
                b[6..8].fill(0)
            }
        }),
        ("rans-end", Profile::Archive, |s, b| {
            if s == Section::RANS_STREAMS {
                // The lowest states.
                b[4..132].as_chunks_mut().0.iter_mut().for_each(|state| *state = [0, 0, 1, 0]);
            }
        }),
        ("rans-fill", Profile::Archive, |s, b| {
            if s == Section::SIGN_MANTISSA_LOW {
                *b.last_mut().unwrap() = 1
            }
        }),
        ("exponents-format", FLOATS, |s, b| {
            if s == Section::FLOAT_FORMAT {
                b[0] = 6
            }
        }),
        ("exponents-palette", FLOATS, |s, b| {
            if s == Section::PALETTE {
                b[0] = 32
            }
        }),
        ("exponents-verbatim", FLOATS, |s, b| {
            if s == Section::VERBATIM_EXPONENTS {
                b[63] = 255
            }
        }),
        ("exponents-start", FLOATS, |s, b| {
            if s == Section::TILE_METADATA {
                b[TileMetadata::BYTES] ^= 1
            }
        }),
        ("exponents-row", FLOATS, |s, b| {
            if s == Section::ROW_LENGTHS {
                // The number of the tile's bits does not change.
                let first = (0..64).find(|&row| b[row] > 0).unwrap();
                let last = (0..64).rfind(|&row| b[row] > 0).unwrap();
                b[first] += 1;
                b[last] -= 1;
            }
        }),
        ("exponents-fill", FLOATS, |s, b| {
            if s == Section::FRACTION_BYTES {
                *b.last_mut().unwrap() = 1
            }
        }),
        ("exponents-group", FLOATS, |s, b| {
            if s == Section::FRACTION_BITS {
                // 13,300 elements: the last group has four elements, 12 of its 24 bits.
                b[13_300 / 8 * 3 + 2] = 0x80
            }
        }),
    ];
    for (name, profile, change) in streams {
        let dir = golden().join("invalid/streams").join(name);
        fs::create_dir_all(dir.parent().unwrap()).unwrap();
        let source = scratch.path(match profile {
            Profile::Palette => "p",
            Profile::Packed => "r",
            Profile::Compact => "c",
            Profile::Archive => "a",
            FLOATS => "f",
            _ => "m",
        });
        let with = if profile == FLOATS { Profile::Distribution } else { profile };
        compress(&source, &dir, &CompressOptions::new(with), &Silent).unwrap();
        let (shard, manifest) = (dir.join("t.safetensors"), dir.join("unweight.json"));
        let mut bytes = fs::read(&shard).unwrap();
        let mut json: serde_json::Value = serde_json::from_slice(&fs::read(&manifest).unwrap()).unwrap();
        let (head, data) = (header(&bytes), 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize);
        let sections = match profile {
            Profile::Palette => EncodingId::PALETTE,
            Profile::Packed => EncodingId::PACKED,
            Profile::Compact => EncodingId::COMPACT,
            Profile::Archive => EncodingId::RANS,
            FLOATS => EncodingId::EXPONENTS,
            _ => EncodingId::HUFFMAN,
        };
        let sections = sections.encoding().sections();
        for (i, &section) in sections.iter().enumerate() {
            let offsets = &head[format!("t.unweight.{}", section.name())]["data_offsets"];
            let at = |i: usize| data + offsets[i].as_u64().unwrap() as usize;
            let part = &mut bytes[at(0)..at(1)];
            change(section, part);
            json["files"][0]["tensors"][0]["sections"][i]["digest"] = Digest::of(part).to_string().into();
        }
        fs::write(shard, bytes).unwrap();
        json["manifest_digest"] = "0".repeat(32).into();
        let text = json.to_string();
        let key = |digits: &str| format!("\"manifest_digest\":\"{digits}\"");
        let digest = Digest::of(text.as_bytes()).to_string();
        fs::write(manifest, text.replace(&key(&"0".repeat(32)), &key(&digest))).unwrap();
    }
    let matrix = edge_weights();
    assert!(
        huffman::encode(Matrix::new(&matrix, 70, 130).unwrap(), Default::default()).unwrap().max_verbatim_rows() > 0
    );
}
