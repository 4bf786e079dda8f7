//! Tensors that are stored as differences from a base (`docs/format.md` A.14, B.11).

use std::{
    fs,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

use proptest::prelude::*;
use unweight_format::{
    CodeLimit, CodecError, Digest, EncodingId, Float, FloatMatrix, StoredTensor, Survey, TileGrid,
    bundle::{
        Bundle, BundleError, CompressOptions, CompressReport, DecompressOptions, ErrorClass, Profile, Progress, Remedy,
        Silent, VerifyAfter, VerifyOptions, compress, decompress, verify_with,
    },
    raw::{Section, oracle},
    testing::{Random, Weights, float_weights},
};

use crate::common::{Scratch, chain, noise, read_tree, safetensors_file, tensor, weights};

/// Moves some elements to a neighbour, as a training step does.
fn trained(bytes: &[u8], width: usize, seed: u64) -> Vec<u8> {
    let mut random = Random::new(seed);
    let mut bytes = bytes.to_vec();
    for element in bytes.chunks_exact_mut(width) {
        if random.below(3) == 0 {
            element[0] = element[0].wrapping_add(random.below(7) as u8).wrapping_sub(3);
        }
    }
    bytes
}

/// A base and a model that was trained from it, in directories `base` and `model`.
struct Models {
    scratch: Scratch,
}

impl Models {
    fn new() -> Self {
        let scratch = Scratch::new();
        let (base, model) = (scratch.path("base"), scratch.path("model"));
        let (a, b, f) = (weights(96 * 130, 1), weights(64 * 64, 2), float_weights(Float::F32, 70 * 40, 3));
        let put = |dir: &Path, file: &str, tensors: &[_]| {
            fs::create_dir_all(dir).unwrap();
            fs::write(dir.join(file), safetensors_file(&[], tensors)).unwrap();
        };
        put(
            &base,
            "model.safetensors",
            &[
                tensor("trained", "BF16", &[96, 130], &a),
                tensor("same", "BF16", &[64, 64], &b),
                tensor("float", "F32", &[70, 40], &f),
                tensor("other.shape", "BF16", &[64, 64], &b),
                tensor("other.type", "BF16", &[64, 64], &b),
                tensor("unlike", "BF16", &[64, 64], &noise(8192)),
                tensor("norm", "BF16", &[130], &a[..260]),
            ],
        );
        put(
            &model,
            "model.safetensors",
            &[
                tensor("trained", "BF16", &[96, 130], &trained(&a, 2, 4)),
                tensor("same", "BF16", &[64, 64], &b),
                tensor("float", "F32", &[70, 40], &trained(&f, 4, 5)),
                tensor("other.shape", "BF16", &[32, 128], &b),
                tensor("other.type", "F16", &[64, 64], &b),
                tensor("unlike", "BF16", &[64, 64], &b),
                tensor("new", "BF16", &[64, 64], &b),
                tensor("norm", "BF16", &[130], &a[..260]),
            ],
        );
        fs::write(model.join("config.json"), "{}").unwrap();
        Self { scratch }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.scratch.path(name)
    }

    fn compress(&self, base: &str, out: &str) -> CompressReport {
        let options = CompressOptions::new(Profile::Archive).base(self.path(base));
        compress(&self.path("model"), &self.path(out), &options, &Silent).unwrap()
    }

    fn restore(&self, bundle: &str, base: Option<&str>, out: &str) -> Result<(), BundleError> {
        let options = DecompressOptions::default().base(base.map(|base| self.path(base)));
        decompress(&self.path(bundle), &self.path(out), &options, &Silent).map(drop)
    }
}

#[test]
fn models_come_back_from_a_base_of_either_kind() {
    let models = Models::new();
    compress(&models.path("base"), &models.path("base-bundle"), &CompressOptions::default(), &Silent).unwrap();
    let report = models.compress("base", "bundle");
    let other = models.compress("base-bundle", "bundle-2");
    assert_eq!((report.base_tensors, report.verified_tensors), (3, 8));
    // The same tensors, whatever the base is stored as: only its name differs.
    let tensors = |bundle: &str| Bundle::open_without_base(&models.path(bundle)).unwrap().manifest().files.clone();
    assert_eq!(tensors("bundle"), tensors("bundle-2"));
    assert_eq!(report.stored_bytes + "-bundle".len() as u64, other.stored_bytes);
    let encoding = |name: &str| report.tensors.iter().find(|tensor| tensor.name == name).unwrap();
    for (name, is_delta) in [
        ("trained", true),
        ("same", true),
        ("float", true),
        ("other.shape", false),
        ("other.type", false),
        ("unlike", false),
        ("new", false),
        ("norm", false),
    ] {
        assert_eq!(encoding(name).encoding == EncodingId::PLANES, is_delta, "{name}");
    }
    // A third of the elements changes by up to 3; equal tensors are tables and states.
    assert!(encoding("trained").bits_per_element < 4.0, "{}", encoding("trained").bits_per_element);
    assert!(encoding("same").stored_bytes < 1024, "{}", encoding("same").stored_bytes);
    let source = read_tree(&models.path("model"));
    for (i, (bundle, base)) in [
        ("bundle", Some("base")),
        ("bundle", Some("base-bundle")),
        ("bundle-2", Some("base")),
        // The recorded name, next to the bundle.
        ("bundle", None),
        ("bundle-2", None),
    ]
    .into_iter()
    .enumerate()
    {
        let out = format!("back-{i}");
        models.restore(bundle, base, &out).unwrap();
        assert!(read_tree(&models.path(&out)) == source, "{bundle} {base:?}");
        let base = base.map(|base| models.path(base));
        let options = VerifyOptions::default().base(base.clone()).against(models.path("model"));
        assert!(verify_with(&models.path(bundle), &options, &Silent).unwrap().is_ok());
        let open = Bundle::open_with_base(&models.path(bundle), base.as_deref()).unwrap();
        let trained = open.tensor("trained").unwrap();
        assert_eq!(Digest::of(&trained.decode().unwrap()), trained.entry().digest);
        assert_eq!(trained.decode_part(3..5, 0..130).unwrap().bytes, trained.decode().unwrap()[3 * 260..5 * 260]);
        assert_eq!(trained.stored().unwrap_err().code(), "base-needed");
    }
    // Without the base, the bundle can be described and its headers checked.
    fs::rename(models.path("base"), models.path("moved")).unwrap();
    let open = Bundle::open_without_base(&models.path("bundle")).unwrap();
    assert_eq!(open.manifest().base.as_ref().unwrap().name, "base");
    assert!(verify_with(&models.path("bundle"), &VerifyOptions::default().quick(true), &Silent).unwrap().is_ok());
    assert_eq!(open.tensor("trained").unwrap().decode().unwrap_err().code(), "base-needed");
    open.tensor("new").unwrap().decode().unwrap();
    let digest = open.manifest().base.as_ref().unwrap().digest.to_string();
    for error in [
        Bundle::open(&models.path("bundle")).unwrap_err(),
        Bundle::open_weights(&models.path("bundle")).unwrap_err(),
        Bundle::open_with_base(&models.path("bundle"), None).unwrap_err(),
        models.restore("bundle", None, "none").unwrap_err(),
        verify_with(&models.path("bundle"), &VerifyOptions::default(), &Silent).unwrap_err(),
    ] {
        let text = error.to_string();
        assert_eq!((error.code(), error.class()), ("base-needed", ErrorClass::Failed));
        assert!(text.contains("'base'") && text.contains(&digest), "{text}");
        assert_eq!(error.remedy(), Some(Remedy::PassBase));
    }
    assert!(!models.path("none").exists());
}

#[test]
fn a_wrong_base_is_refused_with_both_digests() {
    let models = Models::new();
    models.compress("base", "bundle");
    let open = Bundle::open_without_base(&models.path("bundle")).unwrap();
    let expected = open.tensor("same").unwrap().entry().base.unwrap().to_string();
    // The tensor `same` differs in one bit.
    let mut file = fs::read(models.path("base/model.safetensors")).unwrap();
    let header = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize + 8;
    file[header + 96 * 130 * 2 + 5] ^= 1;
    fs::create_dir(models.path("wrong")).unwrap();
    fs::write(models.path("wrong/model.safetensors"), &file).unwrap();
    let got = Digest::of(&file[header + 96 * 130 * 2..][..8192]).to_string();
    compress(&models.path("wrong"), &models.path("wrong-bundle"), &CompressOptions::default(), &Silent).unwrap();
    for base in ["wrong", "wrong-bundle"] {
        let error = models.restore("bundle", Some(base), "out").unwrap_err();
        let text = error.to_string();
        assert_eq!((error.code(), error.class()), ("base-wrong", ErrorClass::Failed), "{text}");
        assert!(text.contains("'same'") && text.contains(&expected) && text.contains(&got), "{text}");
        let options = VerifyOptions::default().base(models.path(base));
        assert_eq!(verify_with(&models.path("bundle"), &options, &Silent).unwrap_err().code(), "base-wrong");
        assert!(!models.path("out").exists());
        _ = fs::remove_dir_all(models.path("out.partial"));
    }
    // A base without the tensor, or with another shape or type.
    for (i, (dtype, shape)) in [("BF16", [32, 128]), ("F16", [64, 64]), ("BF16", [1, 1])].into_iter().enumerate() {
        let (dir, bytes) = (models.path(&format!("other-{i}")), weights(shape[0] * shape[1], 2));
        let tensors = [
            tensor("trained", "BF16", &[96, 130], &weights(96 * 130, 1)),
            tensor(if i == 2 { "unknown" } else { "same" }, dtype, &shape, &bytes),
            tensor("float", "F32", &[70, 40], &float_weights(Float::F32, 70 * 40, 3)),
        ];
        fs::create_dir(&dir).unwrap();
        fs::write(dir.join("model.safetensors"), safetensors_file(&[], &tensors)).unwrap();
        let error = models.restore("bundle", Some(&format!("other-{i}")), "out").unwrap_err();
        assert!(
            error.code() == "base-wrong" && error.to_string().contains("here it is missing, or of another type"),
            "{error}"
        );
    }
    for (base, code) in [("nowhere", "path-not-found"), ("bundle/config.json", "not-a-directory")] {
        assert_eq!(models.restore("bundle", Some(base), "out").unwrap_err().code(), code, "{base}");
    }
}

#[test]
fn a_base_has_no_base() {
    let models = Models::new();
    models.compress("base", "bundle");
    let options = CompressOptions::default().base(models.path("bundle"));
    let error = compress(&models.path("model"), &models.path("out"), &options, &Silent).unwrap_err();
    assert!(error.code() == "base-has-base" && error.to_string().contains("decompress it"), "{error}");
    // A bundle that names itself as base, and two that name each other.
    fs::remove_dir_all(models.path("base")).unwrap();
    fs::rename(models.path("bundle"), models.path("base")).unwrap();
    assert_eq!(models.restore("base", None, "out").unwrap_err().code(), "base-has-base");
    assert_eq!(models.restore("base", Some("base"), "out").unwrap_err().code(), "base-has-base");
}

/// Changes the manifest of a bundle, and gives it the right digest.
fn reseal(bundle: &Path, change: impl FnOnce(&mut serde_json::Value)) {
    let path = bundle.join("unweight.json");
    let mut json: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    change(&mut json);
    json["manifest_digest"] = "0".repeat(32).into();
    let text = json.to_string();
    let digest = Digest::of(text.as_bytes()).to_string();
    let key = |digits: &str| format!("\"manifest_digest\":\"{digits}\"");
    fs::write(path, text.replace(&key(&"0".repeat(32)), &key(&digest))).unwrap();
}

#[test]
fn hostile_bundles_are_refused() {
    let models = Models::new();
    models.compress("base", "bundle");
    let sound = fs::read(models.path("bundle/unweight.json")).unwrap();
    type Change = fn(&mut serde_json::Value);
    let weights = |json: &mut serde_json::Value| -> usize {
        json["files"].as_array().unwrap().iter().position(|file| file["kind"] == "weights").unwrap()
    };
    let file = weights(&mut serde_json::from_slice(&sound).unwrap());
    assert_eq!(file, 1, "the changes below");
    let changes: [(Change, &str); 8] = [
        (|json| json["base"]["digest"] = "0".repeat(32).into(), "does not match the digests"),
        (|json| json["base"] = serde_json::Value::Null, "does not match the digests"),
        (|json| drop(json["files"][1]["tensors"][0].as_object_mut().unwrap().remove("base")), "does not match"),
        (|json| json["files"][1]["tensors"][0]["base"] = "1".repeat(32).into(), "does not match the digests"),
        (|json| json["files"][1]["tensors"][7]["base"] = "1".repeat(32).into(), "does not match the digests"),
        (|json| json["base"]["name"] = "..".into(), "without '.', '..'"),
        (|json| json["base"]["name"] = "a/b".into(), "a path, not a name"),
        (|json| json["base"]["name"] = "".into(), "1 to 4096 bytes"),
    ];
    for (change, message) in changes {
        fs::write(models.path("bundle/unweight.json"), &sound).unwrap();
        reseal(&models.path("bundle"), change);
        let error = models.restore("bundle", Some("base"), "out").unwrap_err();
        assert!(error.code() == "manifest-invalid" && chain(&error).contains(message), "{message}: {}", chain(&error));
    }
    fs::write(models.path("bundle/unweight.json"), &sound).unwrap();
    // Every flipped byte of the shard is found.
    let shard = fs::read(models.path("bundle/model.safetensors")).unwrap();
    let mut random = Random::new(7);
    for _ in 0..40 {
        let mut damaged = shard.clone();
        damaged[random.below(shard.len() as u64) as usize] ^= 1 << random.below(8);
        fs::write(models.path("bundle/model.safetensors"), &damaged).unwrap();
        let report = verify_with(&models.path("bundle"), &VerifyOptions::default(), &Silent).unwrap();
        assert!(!report.is_ok());
    }
    fs::write(models.path("bundle/model.safetensors"), &shard[..shard.len() - 1]).unwrap();
    assert_eq!(models.restore("bundle", Some("base"), "out").unwrap_err().code(), "bundle-file-size-mismatch");
}

/// Stops after some bytes.
struct CancelAfter(u64, AtomicU64);

impl Progress for CancelAfter {
    fn advance(&self, bytes: u64) {
        self.1.fetch_add(bytes, Ordering::Relaxed);
    }

    fn cancelled(&self) -> bool {
        self.1.load(Ordering::Relaxed) >= self.0
    }
}

#[test]
fn interrupted_runs_resume_with_the_same_base_only() {
    let models = Models::new();
    for (name, seed) in [("a", 20), ("b", 21), ("c", 22)] {
        let bytes = weights(128 * 128, seed);
        for (dir, bytes) in [("base", bytes.clone()), ("model", trained(&bytes, 2, seed))] {
            let file = safetensors_file(&[], &[tensor(name, "BF16", &[128, 128], &bytes)]);
            fs::write(models.path(dir).join(format!("{name}.safetensors")), file).unwrap();
        }
    }
    let options = CompressOptions::new(Profile::Archive).base(models.path("base")).ram_bytes(Some(1 << 16));
    let run = |out: &str, options: CompressOptions, bytes: u64| {
        compress(&models.path("model"), &models.path(out), &options, &CancelAfter(bytes, AtomicU64::new(0)))
    };
    let whole = run("whole", options.clone(), u64::MAX).unwrap();
    assert_eq!(whole.base_tensors, 6);
    assert_eq!(run("out", options.clone(), 80_000).unwrap_err().code(), "interrupted");
    let resumed = run("out", options.clone().resume(true), u64::MAX).unwrap();
    assert!(!resumed.resumed_files.is_empty());
    assert!(read_tree(&models.path("out")) == read_tree(&models.path("whole")));
    // Decompression resumes, too.
    let restore = |resume: bool, bytes: u64| {
        let options = DecompressOptions::default().resume(resume).ram_bytes(Some(1 << 16));
        decompress(&models.path("out"), &models.path("back"), &options, &CancelAfter(bytes, AtomicU64::new(0)))
    };
    assert_eq!(restore(false, 80_000).unwrap_err().code(), "interrupted");
    restore(true, u64::MAX).unwrap();
    assert!(read_tree(&models.path("back")) == read_tree(&models.path("model")));
    // A run with another base starts over.
    assert_eq!(run("other", options.clone(), 80_000).unwrap_err().code(), "interrupted");
    fs::write(models.path("base/new.txt"), "").unwrap();
    fs::write(models.path("base/d.safetensors"), safetensors_file(&[], &[tensor("d", "U8", &[1], &[1])])).unwrap();
    let other = run("other", options.resume(true), u64::MAX).unwrap();
    assert!(other.resumed_files.is_empty() && other.resumed_tensors == 0);
}

#[test]
fn tensors_are_found_by_file_and_name() {
    let scratch = Scratch::new();
    let (base, model) = (scratch.path("base"), scratch.path("model"));
    let (one, two) = (weights(4096, 1), weights(4096, 2));
    let put = |dir: &Path, file: &str, bytes: &[u8]| {
        fs::create_dir_all(dir).unwrap();
        fs::write(dir.join(file), safetensors_file(&[], &[tensor("t", "BF16", &[64, 64], bytes)])).unwrap();
    };
    put(&base, "1.safetensors", &one);
    put(&base, "2.safetensors", &two);
    put(&model, "2.safetensors", &two);
    put(&model, "3.safetensors", &one);
    let options = CompressOptions::default().base(base).verify(VerifyAfter::Sample);
    let report = compress(&model, &scratch.path("bundle"), &options, &Silent).unwrap();
    // In `3.safetensors` the name is ambiguous.
    let encodings: Vec<_> = report.tensors.iter().map(|tensor| tensor.encoding).collect();
    assert_eq!(encodings, [EncodingId::PLANES, EncodingId::HUFFMAN]);
    // The output must not be inside the base.
    let options = CompressOptions::default().base(scratch.path("base"));
    let error = compress(&model, &scratch.path("base/out"), &options, &Silent).unwrap_err();
    assert_eq!(error.code(), "output-overlaps-source");
}

// ---- the encoding `planes` ----

fn planes(float: Float, bytes: &[u8], rows: usize, cols: usize) -> StoredTensor<Vec<u8>> {
    let matrix = FloatMatrix::new(float, bytes, rows, cols).unwrap();
    let survey = Survey::of(float, bytes);
    StoredTensor::encode(EncodingId::PLANES, matrix, &survey, CodeLimit::DEFAULT).unwrap()
}

fn check(float: Float, bytes: &[u8], rows: usize, cols: usize) -> StoredTensor<Vec<u8>> {
    let tensor = planes(float, bytes, rows, cols);
    let mut out = vec![0; bytes.len()];
    tensor.decode(&mut out).unwrap();
    assert!(out == bytes);
    assert!(oracle::decode_planes(&tensor).unwrap().unwrap() == bytes);
    tensor
}

/// The example of `docs/format.md` A.14.
#[test]
fn the_worked_example_has_these_bytes() {
    let differences = [0u16, 0, 0, 0, 2, 0].map(u16::to_le_bytes);
    let tensor = check(Float::Bf16, differences.as_flattened(), 2, 3);
    let (tables, streams) =
        (tensor.section(Section::PLANE_TABLES).unwrap(), tensor.section(Section::PLANE_STREAMS).unwrap());
    assert_eq!((tables[0], &tables[1..16], tables.len()), (2, &[0; 15][..], 112));
    assert_eq!(tables[16..28], [0x00, 0x70, 0x55, 0x01, 0xa0, 0xaa, 0x02, 0xf0, 0x2a, 0x00, 0x5a, 0xf5]);
    let numbers: Vec<u32> = streams.as_chunks::<4>().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect();
    let state = |i: usize| match i {
        8 => 0x0005_ffe0,
        0 | 2 | 4 | 6 | 10 => 0x0001_32b1,
        _ => 0x0001_0000,
    };
    let expected: Vec<u32> = [0].into_iter().chain((0..32).map(state)).chain([0; 3]).collect();
    assert_eq!(numbers, expected);
}

#[test]
fn planes_of_every_type_round_trip() {
    for kind in Weights::ALL {
        check(Float::Bf16, &kind.bytes(70 * 130, 1), 70, 130);
    }
    for float in Float::ALL {
        check(float, &float_weights(float, 35 * 67, 1), 35, 67);
        check(float, &noise(float.bytes()), 1, 1);
        // Several chunks.
        check(float, &float_weights(float, 1100 * 601, 2), 1100, 601);
    }
    let zeros = check(Float::Bf16, &vec![0; 2 << 20], 1024, 1024);
    // Four chunks without words.
    assert!(zeros.stored_bytes() < 4 * 132 + 16 + 16 + 144 + 16, "{}", zeros.stored_bytes());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_bytes_round_trip_as_planes(
        rows in 1usize..9,
        cols in 1usize..40,
        float in prop::sample::select(Float::ALL.to_vec()),
        seed: u64,
        mask: u8,
    ) {
        let bytes: Vec<u8> = Random::new(seed).bytes(rows * cols * float.bytes()).iter().map(|b| b & mask).collect();
        check(float, &bytes, rows, cols);
    }

    #[test]
    fn any_models_come_back(seed: u64, changed in 0u64..4, noise_of_base: bool) {
        let scratch = Scratch::new();
        let (base, model) = (scratch.path("base"), scratch.path("model"));
        let mut random = Random::new(seed);
        let first = if noise_of_base { random.bytes(2 * 40 * 33) } else { weights(40 * 33, seed) };
        let second: Vec<u8> =
            first.iter().map(|&byte| if random.below(4) < changed { random.bits() as u8 } else { byte }).collect();
        for (dir, bytes) in [(&base, &first), (&model, &second)] {
            fs::create_dir(dir).unwrap();
            let file = safetensors_file(&[], &[tensor("t", "BF16", &[40, 33], bytes)]);
            fs::write(dir.join("model.safetensors"), file).unwrap();
        }
        compress(&model, &scratch.path("bundle"), &CompressOptions::default().base(base), &Silent).unwrap();
        decompress(&scratch.path("bundle"), &scratch.path("back"), &DecompressOptions::default(), &Silent).unwrap();
        prop_assert!(read_tree(&scratch.path("back")) == read_tree(&model));
    }
}

/// A tensor with changed sections.
fn tampered(change: impl Fn(Section, &mut Vec<u8>)) -> Result<StoredTensor<Vec<u8>>, CodecError> {
    let tensor = planes(Float::Bf16, &weights(600 * 520, 3), 600, 520);
    let sections = tensor.sections().map(|(section, bytes)| {
        let mut bytes = bytes.to_vec();
        change(section, &mut bytes);
        bytes
    });
    StoredTensor::new(EncodingId::PLANES, TileGrid::new(600, 520).unwrap(), sections.collect())
}

#[test]
fn hostile_planes_are_refused() {
    let fails = |section: Section, message: &str, change: &dyn Fn(&mut Vec<u8>)| {
        let result = tampered(|s, bytes| {
            if s == section {
                change(bytes)
            }
        });
        let Err(CodecError::Code { section: named, reason }) = &result else { panic!("{message}: {result:?}") };
        assert!(*named == section.name() && reason.contains(message), "{message}: {named}: {reason}");
    };
    let (tables, streams) = (Section::PLANE_TABLES, Section::PLANE_STREAMS);
    for width in [0, 3, 5, 8, 255] {
        fails(tables, "1, 2 or 4 bytes", &|b| b[0] = width);
    }
    fails(tables, "1, 2 or 4 bytes", &|b| b.clear());
    fails(tables, "zeros must follow", &|b| b[15] = 1);
    fails(tables, "a number is missing", &|b| b[0] = 4);
    fails(tables, "only zeros up to", &|b| b[0] = 1);
    fails(tables, "only zeros up to", &|b| b.extend([0; 16]));
    fails(tables, "do not add up to 4096", &|b| b[16..].fill(0xff));
    fails(streams, "ends before the last chunk", &|b| b.truncate(112));
    fails(streams, "more words than elements", &|b| b[3] = 1);
    fails(streams, "below 65536", &|b| b[6..8].fill(0));
    fails(streams, "only zeros up to", &|b| b.extend([0; 16]));
    // Of another type than the tensor.
    let tensor = tampered(|_, _| {}).unwrap();
    assert!(matches!(tensor.decode(&mut vec![0; 600 * 520]), Err(CodecError::TensorBytes { .. })));
}

#[test]
fn damaged_planes_never_panic() {
    let (mut refused, mut errors, mut decoded) = (0, 0, 0);
    let mut random = Random::new(10);
    for _ in 0..60 {
        let (at, bit, section) = (random.bits() as usize, random.below(8), random.below(2) as usize);
        let result = tampered(|s, bytes| {
            if s == EncodingId::PLANES.encoding().sections()[section] {
                let at = at % bytes.len();
                bytes[at] ^= 1 << bit;
            }
        });
        let Ok(tensor) = result else {
            refused += 1;
            continue;
        };
        let mut fast = vec![0; 600 * 520 * 2];
        match (tensor.decode(&mut fast), oracle::decode_planes(&tensor).unwrap()) {
            (Ok(()), Ok(slow)) => {
                assert!(fast == slow);
                decoded += 1;
            }
            (fast, slow) => {
                assert_eq!(fast.err(), slow.err());
                errors += 1;
            }
        }
    }
    assert!(refused > 5 && errors > 5, "{refused} {errors} {decoded}");
}
