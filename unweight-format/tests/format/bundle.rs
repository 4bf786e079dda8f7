//! Whole models through compress and decompress, and everything that must be refused.

use std::{
    collections::BTreeMap,
    fs, io,
    path::Path,
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

use unweight_format::{
    CodeLimit, CodecError, Digest, EncodingId, FloatMatrix, NotEncodable, StoredTensor,
    bundle::{
        Bundle, BundleError, CompressOptions, CpuEncoder, DecompressOptions, Encoder, EncoderError, ErrorClass,
        Profile, Progress, Remedy, Scope, Silent, VerifyAfter, compress, compress_with, decompress, plan, verify,
    },
    testing::{
        Random,
        demo_model::{self, DemoOptions},
    },
};

use crate::{
    attacks,
    common::{self, Scratch, header, narrow, read_tree, real_model, safetensors_file, small_model, tensor},
};

fn round_trip(source: &Path, options: &CompressOptions) -> BTreeMap<String, Vec<u8>> {
    let scratch = Scratch::new();
    let (bundle, back) = (scratch.path("bundle"), scratch.path("back"));
    let report = compress(source, &bundle, options, &Silent).unwrap();
    let files = read_tree(&bundle);
    assert_eq!(files.values().map(|f| f.len() as u64).sum::<u64>(), report.stored_bytes);
    let verified = verify(&bundle, Some(source), &Silent).unwrap();
    assert!(verified.is_ok(), "{:?}", verified.problems);
    assert_eq!(verified.stored_bytes, report.stored_bytes);
    let rebuilt = decompress(&bundle, &back, &DecompressOptions::default(), &Silent).unwrap();
    assert!(read_tree(source) == read_tree(&back), "the files come back byte for byte");
    assert_eq!(rebuilt.bytes, report.original_bytes);
    assert_eq!(rebuilt.files.len() as u64, report.files);
    assert!(!scratch.path("bundle.partial").exists() && !scratch.path("back.partial").exists());
    files
}

#[test]
fn real_weights_round_trip_in_every_profile() {
    let scratch = Scratch::new();
    let source = real_model(&scratch);
    for &profile in Profile::ALL {
        for &scope in Scope::ALL {
            let mut options = CompressOptions::new(profile);
            options.scope = scope;
            options.verify = VerifyAfter::Full;
            options.sha256 = true;
            round_trip(&source, &options);
        }
    }
}

#[test]
fn real_weights_shrink_to_two_thirds() {
    let scratch = Scratch::new();
    let report = compress(&real_model(&scratch), &scratch.path("b"), &CompressOptions::default(), &Silent).unwrap();
    assert!((0.65..0.72).contains(&report.ratio), "{}", report.ratio);
    assert!(report.encodings.iter().any(|e| e.encoding == EncodingId::HUFFMAN));
    let raw: Vec<_> = report.tensors.iter().filter(|t| t.encoding == EncodingId::RAW).collect();
    assert!(raw.iter().all(|t| t.reason.is_some()));
    assert!(report.tensors.iter().filter(|t| t.encoding != EncodingId::RAW).all(|t| t.stored_bytes < t.original_bytes));
}

#[test]
fn plan_predicts_the_sizes_of_compress() {
    let scratch = Scratch::new();
    let source = scratch.path("model");
    demo_model::write(&source, &DemoOptions { layers: 3, vocab: 2048, ..DemoOptions::default() }).unwrap();
    for &profile in Profile::ALL {
        let options = CompressOptions::new(profile);
        let planned = plan(&source, &options).unwrap();
        let done = compress(&source, &scratch.path(profile.name()), &options, &Silent).unwrap();
        assert!((planned.ratio - done.ratio).abs() < 0.01, "{profile}: {} {}", planned.ratio, done.ratio);
        for (planned, done) in planned.tensors.iter().zip(&done.tensors) {
            assert_eq!((&planned.name, planned.encoding, &planned.reason), (&done.name, done.encoding, &done.reason));
            let error = planned.stored_bytes as f64 / done.stored_bytes as f64 - 1.0;
            assert!(error.abs() < 0.02, "{}: {} {}", done.name, planned.stored_bytes, done.stored_bytes);
        }
    }
}

#[test]
fn inference_profile_alternates_huffman_and_palette_layers() {
    let scratch = Scratch::new();
    let (source, bundle) = (scratch.path("model"), scratch.path("bundle"));
    let demo = DemoOptions {
        layers: 4,
        hidden: 128,
        intermediate: 256,
        heads: 4,
        kv_heads: 2,
        vocab: 256,
        shards: 1,
        ..DemoOptions::default()
    };
    demo_model::write(&source, &demo).unwrap();
    compress(&source, &bundle, &CompressOptions::new(Profile::Inference), &Silent).unwrap();
    let bundle = Bundle::open(&bundle).unwrap();
    let encoding = |name: &str| match bundle.tensor(&format!("model.layers.{name}_proj.weight")).unwrap().encoding() {
        EncodingId::RAW => 'R',
        EncodingId::HUFFMAN => 'H',
        EncodingId::PALETTE => 'P',
        _ => '?',
    };
    let layer = |i: usize| ["gate", "up", "down"].map(|p| encoding(&format!("{i}.mlp.{p}"))).iter().collect::<String>();
    assert_eq!([0, 1, 2, 3].map(layer), ["RRR", "PPR", "HHR", "PPR"]);
    assert_eq!(encoding("1.self_attn.q"), 'R');
    let source = fs::read(source.join("model.safetensors")).unwrap();
    let decoded = bundle.tensor("model.layers.2.mlp.up_proj.weight").unwrap().decode().unwrap();
    assert!(source.windows(decoded.len()).any(|window| window == decoded));
    assert!(matches!(bundle.tensor("nothing"), Err(BundleError::UnknownTensor { .. })));
}

/// Normal weights with every `step`-th element replaced.
fn sprinkled(elements: usize, step: usize, other: impl Fn(usize) -> u16) -> Vec<u8> {
    let mut bytes = common::weights(elements, 21);
    for (i, element) in bytes.chunks_exact_mut(2).enumerate().filter(|(i, _)| i % step == 0) {
        element.copy_from_slice(&other(i / step).to_le_bytes());
    }
    bytes
}

/// Tensors that cannot be packed get the fallback of docs/format.md B.6, and everything is restored bit for bit.
#[test]
fn packed_profile_falls_back_with_a_reason() {
    let scratch = Scratch::new();
    let source = scratch.path("model");
    fs::create_dir(&source).unwrap();
    let special = [0u16, 0x8000, 1, 0x807f, 0x7f80, 0xff80, 0x7f81, 0xffff, 0x0080];
    let mut rng = Random::new(22);
    let wide: Vec<u8> = (0..128 * 128).flat_map(|_| (rng.bits() as u16).to_le_bytes()).collect();
    // Student t with one degree of freedom: 1.4 % are outside any window.
    let mut cauchy = || half::bf16::from_f64(0.001 * rng.normal() / rng.normal()).to_le_bytes();
    let heavy: Vec<u8> = (0..128 * 128).flat_map(|_| cauchy()).collect();
    let n = 128 * 128;
    let (packed, palette, raw) = (EncodingId::PACKED, EncodingId::PALETTE, EncodingId::RAW);
    let outside = "% of the elements lie outside the best window of 16 exponents, the limit is 0.39 %";
    // Name, shape, weights, encoding, and parts of the reason.
    type Case<'a> = (&'a str, [usize; 2], Vec<u8>, EncodingId, &'a [&'a str]);
    let cases: [Case<'_>; 11] = [
        ("normal", [128, 128], common::weights(n, 1), packed, &[]),
        ("special", [128, 128], sprinkled(n, 400, |i| special[i % special.len()]), packed, &[]),
        ("zeros below the limit", [128, 128], sprinkled(n, 300, |_| 0), packed, &[]),
        ("one percent of zeros", [128, 128], sprinkled(n, 100, |_| 0), palette, &["not packed: ", outside]),
        ("all zeros", [128, 128], vec![0; 2 * n], palette, &["not packed: 100.00 %"]),
        ("subnormals", [128, 128], sprinkled(n, 50, |i| i as u16 & 0x7f), palette, &["not packed: ", outside]),
        ("infinities", [128, 128], sprinkled(n, 60, |_| 0x7f80), palette, &["not packed: ", outside]),
        ("heavy tails", [128, 128], heavy, palette, &["not packed: ", outside]),
        ("any bits", [128, 128], wide, raw, &["not packed: ", outside, "; not smaller as palette"]),
        (
            "odd",
            [130, 128],
            common::weights(130 * 128, 2),
            palette,
            &["not packed: rows or columns are not a multiple of 64"],
        ),
        (
            "huge",
            [128, 128],
            sprinkled(n, 9000, |_| 0x7f7f),
            palette,
            &["not packed: element [0, 0] has no exact operand"],
        ),
    ];
    let tensors: Vec<_> = cases.iter().map(|(name, shape, bytes, ..)| tensor(name, "BF16", shape, bytes)).collect();
    fs::write(source.join("model.safetensors"), safetensors_file(&[], &tensors)).unwrap();
    let options = CompressOptions::new(Profile::Packed).verify(VerifyAfter::Full);
    round_trip(&source, &options);
    let planned = plan(&source, &options).unwrap();
    let done = compress(&source, &scratch.path("b"), &options, &Silent).unwrap();
    let bundle = Bundle::open(&scratch.path("b")).unwrap();
    for (i, (name, _, bytes, encoding, reason)) in cases.iter().enumerate() {
        let got = &done.tensors[i];
        assert_eq!((got.name.as_str(), got.encoding), (*name, *encoding), "{:?}", got.reason);
        let text = got.reason.as_deref().unwrap_or_default();
        assert!(
            text.is_empty() == reason.is_empty() && reason.iter().all(|part| text.contains(part)),
            "{name}: {text}"
        );
        assert!(bundle.tensor(name).unwrap().decode().unwrap() == *bytes, "{name}");
        // Decode into memory that is not zero, and refuse buffers of another size.
        let file = bundle.tensors().find(|tensor| tensor.entry().name == *name).unwrap().file();
        let mut buffer = vec![0xa5; bytes.len() + 1];
        let stored = bundle.tensor(name).unwrap();
        stored.decode_into(&mut buffer[..bytes.len()]).unwrap();
        assert!(buffer[..bytes.len()] == *bytes, "{name}");
        buffer.fill(0xa5);
        bundle.tensor_in(file, name).unwrap().decode_into(&mut buffer[1..]).unwrap();
        assert!(buffer[1..] == *bytes && buffer[0] == 0xa5, "{name}");
        buffer.fill(0xa5);
        let is_rejected = match stored.decode_into(&mut buffer) {
            Err(BundleError::Codec { tensor, source: CodecError::TensorBytes { expected, got }, .. }) => {
                tensor == *name && (expected, got) == (bytes.len() as u64, bytes.len() + 1)
            }
            _ => false,
        };
        assert!(is_rejected, "{name}");
        assert!(buffer.iter().all(|byte| *byte == 0xa5), "{name}: the buffer is unchanged");
        assert_eq!(bundle.tensor(name).unwrap().entry().reason, got.reason);
        // A plan uses samples: of such small tensors the sample is everything, but single elements are not checked.
        if *name != "huge" {
            assert_eq!((planned.tensors[i].encoding, &planned.tensors[i].reason), (*encoding, &got.reason), "{name}");
        }
    }
    let with = |name: &str, threads| {
        let options = options.clone().threads(Some(threads)).ram_bytes(Some(1 << 20));
        compress(&source, &scratch.path(name), &options, &Silent).unwrap();
        read_tree(&scratch.path(name))
    };
    assert!(with("one", 1) == with("three", 3));
}

/// An encoder without a kernel for the packed encoding.
struct Unpacked;

impl Encoder for Unpacked {
    fn encode(
        &self,
        matrix: FloatMatrix<'_>,
        encoding: EncodingId,
        limit: CodeLimit,
    ) -> Result<(Digest, StoredTensor<Vec<u8>>), EncoderError> {
        match encoding {
            EncodingId::PACKED => Err(EncoderError::NotEncodable(NotEncodable::new(io::Error::other("no kernel")))),
            _ => CpuEncoder.encode(matrix, encoding, limit),
        }
    }
}

#[test]
fn encoder_misfit_falls_back_with_a_reason() {
    let scratch = Scratch::new();
    let source = scratch.path("model");
    small_model(&source);
    let options = CompressOptions::new(Profile::Packed);
    let report = compress_with(&source, &scratch.path("bundle"), &options, &Unpacked, &Silent).unwrap();
    let gate = report.tensors.iter().find(|t| t.name.ends_with("0.mlp.gate_proj.weight")).unwrap();
    assert_eq!((gate.encoding, gate.reason.as_deref()), (EncodingId::PALETTE, Some("not packed: no kernel")));
    assert!(verify(&scratch.path("bundle"), Some(&source), &Silent).unwrap().is_ok());
}

#[test]
fn the_bytes_do_not_depend_on_threads_or_memory() {
    let scratch = Scratch::new();
    let source = scratch.path("model");
    demo_model::write(&source, &DemoOptions { experts: 2, ..narrow(2, 512, 3) }).unwrap();
    let with = |name: &str, threads, ram_bytes| {
        let options = CompressOptions::default().threads(Some(threads)).ram_bytes(ram_bytes);
        compress(&source, &scratch.path(name), &options, &Silent).unwrap();
        read_tree(&scratch.path(name))
    };
    let one = with("one", 1, None);
    assert!(one == with("three", 3, None));
    assert!(one == with("little", 2, Some(1 << 18)));
}

#[test]
fn every_dtype_and_odd_shape_round_trips_with_aligned_sections() {
    let scratch = Scratch::new();
    let source = scratch.path("model");
    fs::create_dir_all(source.join("sub/deep")).unwrap();
    let weights = |n: usize, seed: u64| common::weights(n, seed);
    let file = safetensors_file(
        &[("format", "pt"), ("unweight_version", "mine"), ("note", "\u{e9}\"\\")],
        &[
            tensor("scalar", "BF16", &[], &weights(1, 1)),
            tensor("odd", "BF16", &[129, 131], &weights(129 * 131, 2)),
            tensor("bias", "BF16", &[3], &weights(3, 3)),
            tensor("m.weight", "BF16", &[256, 256], &weights(256 * 256, 4)),
            tensor("empty", "BF16", &[0, 64], &[]),
            tensor("conv", "BF16", &[32, 16, 3, 3], &weights(32 * 16 * 9, 5)),
            tensor("tiny", "BF16", &[2, 2], &weights(4, 6)),
            tensor("ones", "BF16", &[1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 96, 80], &weights(96 * 80, 7)),
            tensor("noise", "BF16", &[100, 100], &common::noise(20_000)),
            tensor("mask", "BOOL", &[5], &[1, 0, 1, 1, 0]),
            tensor("f32", "F32", &[2, 2], &[0; 16]),
            tensor("f64", "F64", &[1], &[1; 8]),
            tensor("i64", "I64", &[3], &[2; 24]),
            tensor("fp4", "F4", &[3, 2], &[3; 3]),
        ],
    );
    fs::write(source.join("odd.safetensors"), &file).unwrap();
    fs::write(source.join("sub/deep/also.safetensors"), &file).unwrap();
    fs::write(source.join("only-header.safetensors"), safetensors_file(&[], &[])).unwrap();
    fs::write(source.join("empty.bin"), []).unwrap();
    fs::write(source.join("sub/README \u{2603}"), "text").unwrap();
    for &profile in Profile::ALL {
        let mut options = CompressOptions::new(profile);
        options.scope = Scope::All;
        let files = round_trip(&source, &options);
        let bytes = &files["odd.safetensors"];
        let json = header(bytes);
        let data = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap());
        assert_eq!(data % 64, 0);
        for (name, entry) in json.as_object().unwrap().iter().filter(|(name, _)| *name != "__metadata__") {
            let at = entry["data_offsets"][0].as_u64().unwrap();
            let element = match entry["dtype"].as_str().unwrap() {
                "U32" => 16,
                "BF16" => 2,
                "F32" => 4,
                "F64" | "I64" => 8,
                _ => 1,
            };
            assert_eq!(at % element, 0, "{profile}: {name}");
        }
        let metadata = &json["__metadata__"];
        assert_eq!(metadata["format"], "unweight");
        assert_eq!(metadata["unweight.source.format"], "pt");
        assert_eq!(metadata["unweight.source.unweight_version"], "mine");
        assert_eq!(metadata["note"], "\u{e9}\"\\");
    }
}

#[test]
fn a_name_in_two_files_is_ambiguous_until_the_file_is_named() {
    let scratch = Scratch::new();
    let (source, bundle) = (scratch.path("model"), scratch.path("bundle"));
    fs::create_dir(&source).unwrap();
    let file = safetensors_file(&[], &[tensor("t", "BF16", &[64, 64], &common::weights(4096, 1))]);
    fs::write(source.join("a.safetensors"), &file).unwrap();
    fs::write(source.join("b.safetensors"), &file).unwrap();
    compress(&source, &bundle, &CompressOptions::default(), &Silent).unwrap();
    let bundle = Bundle::open(&bundle).unwrap();
    assert!(matches!(bundle.tensor("t"), Err(BundleError::AmbiguousTensor { .. })));
    assert!(matches!(bundle.tensor_in("b.safetensors", "t"), Ok(tensor) if tensor.encoding() == EncodingId::HUFFMAN));
    assert_eq!(bundle.tensors().count(), 2);
}

/// A model with a `config.json` next to weights, another in a subfolder with weights, and one without weights.
fn configured(scratch: &Scratch, name: &str, config: &[u8]) -> std::path::PathBuf {
    let source = scratch.path(name);
    let file = safetensors_file(&[], &[tensor("t", "BF16", &[128, 64], &common::weights(128 * 64, 1))]);
    for (folder, has_weights) in [("", true), ("deeper", true), ("elsewhere", false)] {
        fs::create_dir_all(source.join(folder)).unwrap();
        fs::write(source.join(folder).join("config.json"), config).unwrap();
        if has_weights {
            fs::write(source.join(folder).join("model.safetensors"), &file).unwrap();
        }
    }
    source
}

#[test]
fn config_json_names_its_weights() {
    let scratch = Scratch::new();
    let text = "{\n    \"zeta\": 1.0e-05, \"alpha\": 18446744073709551616,\n\t\"limit\": [0.0, Infinity]\n}";
    let source = configured(&scratch, "model", text.as_bytes());
    let mut digests = Vec::new();
    for profile in [Profile::Distribution, Profile::Packed] {
        let options = CompressOptions::new(profile).sha256(true);
        let files = round_trip(&source, &options);
        let made = scratch.path(profile.name());
        let report = compress(&source, &made, &options, &Silent).unwrap();
        assert!(report.unmarked_configs.is_empty());
        let bundle = Bundle::open(&made).unwrap();
        let digest = bundle.weights_digest().to_string();
        let keys = format!(
            "{{\n    \"quantization_config\": {{\"quant_method\": \"unweight\", \"weights_digest\": \"{digest}\"}},\n    \
             \"transformers_weights\": \"unweight.json\","
        );
        for folder in ["", "deeper/"] {
            let name = format!("{folder}config.json");
            let stored = String::from_utf8(files[&name].clone()).unwrap();
            assert_eq!(stored, text.replacen('{', &keys, 1));
            assert_eq!(files[&format!("{name}.source")], text.as_bytes());
            assert_eq!(bundle.copied(&name, 1 << 20).unwrap().unwrap(), text.as_bytes(), "the original text");
        }
        assert_eq!(files["elsewhere/config.json"], text.as_bytes());
        assert!(!files.contains_key("elsewhere/config.json.source"));
        assert_eq!(plan(&source, &options).unwrap().unmarked_configs, []);
        digests.push(digest);
    }
    assert_ne!(digests[0], digests[1], "two bundles have different digests");

    // Another README changes the manifest, but not the digest of the weights.
    let digest = |source: &Path, name: &str| {
        compress(source, &scratch.path(name), &CompressOptions::default(), &Silent).unwrap();
        let bundle = Bundle::open(&scratch.path(name)).unwrap();
        (bundle.weights_digest(), bundle.manifest().manifest_digest)
    };
    let before = digest(&source, "before");
    assert_eq!(before.0.to_string(), digests[0]);
    fs::write(source.join("README.md"), "read me").unwrap();
    let after = digest(&source, "after");
    assert!(before.0 == after.0 && before.1 != after.1);

    // The name of the copy may be taken by a file or a directory, as may the bundle's own names.
    let assert_reserved = |name: &str| {
        let error = compress(&source, &scratch.path("out"), &CompressOptions::default(), &Silent).unwrap_err();
        assert!(matches!(&error, BundleError::ReservedFile { path } if path.ends_with(name)), "{name}: {error}");
        assert!(!scratch.path("out.partial").exists(), "{name}");
    };
    fs::write(source.join("config.json.source"), "mine").unwrap();
    assert_reserved("config.json.source");
    fs::remove_file(source.join("config.json.source")).unwrap();
    for name in ["config.json.source", "unweight.json", "unweight.json.minisig"] {
        fs::create_dir(source.join(name)).unwrap();
        fs::write(source.join(name).join("mine"), "mine").unwrap();
        assert_reserved(name);
        fs::remove_dir_all(source.join(name)).unwrap();
    }
}

/// Files of two bundles in one directory, as left by a repeated download.
#[test]
fn config_of_another_bundle_is_rejected() {
    let scratch = Scratch::new();
    let source = configured(&scratch, "model", b"{\"a\": 1}");
    let [one, two] = [Profile::Distribution, Profile::Packed].map(|profile| {
        let made = scratch.path(profile.name());
        compress(&source, &made, &CompressOptions::new(profile), &Silent).unwrap();
        made
    });
    for folder in ["", "deeper"] {
        let config = one.join(folder).join("config.json");
        let text_before = fs::read_to_string(&config).unwrap();
        fs::copy(two.join(folder).join("config.json"), &config).unwrap();
        let error = Bundle::open_weights(&one).unwrap_err();
        assert!(matches!(&error, BundleError::OtherConfig { path, .. } if *path == config), "{error}");
        assert_eq!(error.class(), ErrorClass::Mismatch);
        // Any other contents do not name other weights.
        let digest = Bundle::open_weights(&two).unwrap().weights_digest().to_string();
        for text in [
            format!("{{\"quantization_config\": {{\"quant_method\": \"fp8\", \"weights_digest\": \"{digest}\"}}}}"),
            "{\"quantization_config\": {\"quant_method\": \"unweight\"}}".into(),
            text_before.replace("\"a\": 1", "\"a\": 2, \"b\": NaN"),
            "{\"quantization_config\": \"".into(),
            String::new(),
        ] {
            fs::write(&config, &text).unwrap();
            assert!(Bundle::open_weights(&one).is_ok(), "{text}");
        }
        fs::write(&config, text_before).unwrap();
    }
    // This directory contains no weights.
    fs::copy(two.join("config.json"), one.join("elsewhere/config.json")).unwrap();
    assert!(Bundle::open_weights(&one).is_ok());
}

/// A key with `null` gets the value; another method is kept, and the key that makes other readers refuse is added.
#[test]
fn config_gets_a_quantization_method() {
    let scratch = Scratch::new();
    let saved = r#"{"quant_method": "unweight", "weights_digest": "of the bundle that it was saved from"}"#;
    for (name, value, method) in
        [("null", "null", "unweight"), ("fp8", r#"{"quant_method": "fp8"}"#, "fp8"), ("saved", saved, "unweight")]
    {
        let source = configured(&scratch, name, format!("{{\"a\": 1, \"quantization_config\": {value}}}").as_bytes());
        let files = round_trip(&source, &CompressOptions::default());
        let stored: serde_json::Value = serde_json::from_slice(&files["config.json"]).unwrap();
        assert_eq!(stored["quantization_config"]["quant_method"], method);
        assert_eq!((&stored["transformers_weights"], &stored["a"]), (&"unweight.json".into(), &1.into()));
        assert_eq!(files["config.json.source"], fs::read(source.join("config.json")).unwrap());
        assert_eq!(plan(&source, &CompressOptions::default()).unwrap().unmarked_configs, []);
        assert!(!String::from_utf8(files["config.json"].clone()).unwrap().contains("saved from"));
    }
}

#[test]
fn config_that_cannot_be_marked_is_copied_unchanged() {
    let scratch = Scratch::new();
    let large = format!("{{\"a\": \"{}\"}}", "a".repeat(16 << 20));
    let cases: [(&str, &[u8], &str); 3] = [
        ("list", b"[1, 2]", "it is not a JSON object"),
        ("named", br#"{"transformers_weights": "model.safetensors"}"#, "it already has the key transformers_weights"),
        ("large", large.as_bytes(), "it is larger than 16 MiB"),
    ];
    for (name, text, reason) in cases {
        let source = configured(&scratch, name, text);
        // If nothing is changed, no name is reserved either.
        fs::write(source.join("config.json.source"), "mine").unwrap();
        let files = round_trip(&source, &CompressOptions::default());
        assert!(files["config.json"] == text && files["config.json.source"] == b"mine", "{name}");
        let report = plan(&source, &CompressOptions::default()).unwrap();
        let unmarked: Vec<_> = report.unmarked_configs.iter().map(|c| (c.name.as_str(), c.reason)).collect();
        assert_eq!(unmarked, [("config.json", reason), ("deeper/config.json", reason)]);
        let done = compress(&source, &scratch.path("out"), &CompressOptions::default().force(true), &Silent).unwrap();
        assert_eq!(done.unmarked_configs, report.unmarked_configs);
    }
}

/// A hub repository with an edited README, and a download of only the weights.
#[test]
fn weights_open_without_the_other_files() {
    let scratch = Scratch::new();
    let (source, made) = (scratch.path("model"), scratch.path("bundle"));
    small_model(&source);
    fs::write(source.join("README.md"), "as it was").unwrap();
    let mut originals: BTreeMap<String, Vec<u8>> = BTreeMap::new();
    for (_, file) in read_tree(&source).iter().filter(|(name, _)| name.ends_with(".safetensors")) {
        let data = &file[8 + u64::from_le_bytes(file[..8].try_into().unwrap()) as usize..];
        let json = header(file);
        for (name, entry) in json.as_object().unwrap().iter().filter(|(name, _)| *name != "__metadata__") {
            let at = |end: usize| entry["data_offsets"][end].as_u64().unwrap() as usize;
            originals.insert(name.clone(), data[at(0)..at(1)].to_vec());
        }
    }
    compress(&source, &made, &CompressOptions::new(Profile::Packed), &Silent).unwrap();
    let whole = read_tree(&made);
    let decodes = |bundle: &Bundle| {
        assert_eq!(bundle.tensors().count(), originals.len());
        originals
            .iter()
            .for_each(|(name, bytes)| assert!(bundle.tensor(name).unwrap().decode().unwrap() == *bytes, "{name}"));
    };
    decodes(&Bundle::open_weights(&made).unwrap());

    fs::write(made.join("README.md"), "edited, and longer").unwrap();
    assert!(matches!(Bundle::open(&made), Err(BundleError::FileSize { file, .. }) if file == "README.md"));
    let bundle = Bundle::open_weights(&made).unwrap();
    decodes(&bundle);
    let error = bundle.copied("README.md", 1000).unwrap_err();
    assert!(matches!(&error, BundleError::FileSize { file, .. } if file == "README.md"), "{error}");
    fs::write(made.join("README.md"), "as it ain").unwrap();
    let error = Bundle::open_weights(&made).unwrap().copied("README.md", 1000).unwrap_err();
    assert!(matches!(&error, BundleError::Mismatch { file, .. } if file == "README.md"), "{error}");

    // Only the manifest and the shards.
    for name in whole.keys().filter(|name| !name.ends_with(".safetensors") && *name != "unweight.json") {
        fs::remove_file(made.join(name)).unwrap();
    }
    assert!(matches!(Bundle::open(&made), Err(BundleError::MissingFile { .. })));
    let bundle = Bundle::open_weights(&made).unwrap();
    decodes(&bundle);
    for name in ["README.md", "model.safetensors.index.json"] {
        let error = bundle.write_file(name, &mut Vec::new(), &DecompressOptions::default(), &Silent).unwrap_err();
        assert!(matches!(&error, BundleError::MissingFile { file } if file.starts_with(name)), "{error}");
    }

    let shard = "model-00002-of-00002.safetensors";
    let open_error = |bytes: Option<&[u8]>| {
        match bytes {
            Some(bytes) => fs::write(made.join(shard), bytes).unwrap(),
            None => fs::remove_file(made.join(shard)).unwrap(),
        }
        let error = Bundle::open_weights(&made).unwrap_err();
        assert!(error.to_string().starts_with(shard) && error.class() == ErrorClass::Mismatch, "{error}");
        error
    };
    let bytes = &whole[shard];
    assert!(matches!(open_error(Some(&bytes[..bytes.len() - 1])), BundleError::FileSize { .. }));
    let mut other = bytes.clone();
    other[20] ^= 1;
    assert!(matches!(open_error(Some(&other)), BundleError::Mismatch { .. }));
    assert!(matches!(open_error(None), BundleError::MissingFile { .. }));
}

#[test]
fn symbolic_links_are_followed_as_caches_have_them() {
    use std::os::unix::fs::symlink;
    let scratch = Scratch::new();
    let (blobs, source) = (scratch.path("blobs"), scratch.path("snapshot"));
    small_model(&blobs);
    fs::create_dir(&source).unwrap();
    for name in read_tree(&blobs).keys() {
        symlink(blobs.join(name), source.join(name)).unwrap();
    }
    round_trip(&source, &CompressOptions::default());
    symlink(&source, source.join("again")).unwrap();
    let error = compress(&source, &scratch.path("b"), &CompressOptions::default(), &Silent).unwrap_err();
    assert!(matches!(&error, BundleError::Unstorable { reason, .. } if reason.contains("loop")), "{error}");
    fs::remove_file(source.join("again")).unwrap();
    symlink("nowhere", source.join("gone.safetensors")).unwrap();
    let error = compress(&source, &scratch.path("b"), &CompressOptions::default(), &Silent).unwrap_err();
    assert!(error.to_string().contains("gone.safetensors"), "{error}");
}

#[test]
fn patterns_and_plan_files_select_encodings() {
    let scratch = Scratch::new();
    let source = scratch.path("model");
    small_model(&source);
    let plan_file = scratch.path("plan.json");
    fs::write(&plan_file, r#"{"rules": [{"match": "*.1.mlp.*", "encoding": "palette"}]}"#).unwrap();
    let options = CompressOptions::default().exclude(vec!["*embed*".into()]).plan_file(Some(plan_file.clone()));
    let report = compress(&source, &scratch.path("b"), &options, &Silent).unwrap();
    let of = |name: &str| report.tensors.iter().find(|t| t.name == name).unwrap();
    assert_eq!(of("model.embed_tokens.weight").reason.as_deref(), Some("excluded"));
    assert_eq!(of("model.layers.1.mlp.up_proj.weight").encoding, EncodingId::PALETTE);
    assert_eq!(of("model.layers.0.mlp.up_proj.weight").encoding, EncodingId::HUFFMAN);
    for (text, expected) in [
        (r#"{"rules": [{"match": "nothing*", "encoding": "raw"}]}"#, "no tensor matches 'nothing*'"),
        (r#"{"rules": [{"match": "*", "encoding": "zip"}]}"#, "zip"),
        ("[", "a plan file is"),
    ] {
        fs::write(&plan_file, text).unwrap();
        let error = compress(&source, &scratch.path("c"), &options, &Silent).unwrap_err().to_string();
        assert!(error.contains(expected) && error.contains("plan.json"), "{error}");
    }
}

fn assert_rejected(source: &Path, expected: &[&str]) {
    let scratch = Scratch::new();
    for error in [
        compress(source, &scratch.path("out"), &CompressOptions::default(), &Silent).map(|_| ()).unwrap_err(),
        plan(source, &CompressOptions::default()).map(|_| ()).unwrap_err(),
    ] {
        let text = common::chain(&error);
        assert!(expected.iter().all(|part| text.contains(part)), "{text:?} misses one of {expected:?}");
        assert_eq!(error.class(), ErrorClass::Failed);
    }
    assert_eq!(fs::read_dir(scratch.dir()).unwrap().count(), 0, "no files are left");
}

#[test]
fn invalid_sources_are_rejected() {
    let scratch = Scratch::new();
    let case = |name: &str, files: &[(&str, Vec<u8>)], expected: &[&str]| {
        let dir = scratch.path(name);
        fs::create_dir(&dir).unwrap();
        for (file, bytes) in files {
            fs::write(dir.join(file), bytes).unwrap();
        }
        assert_rejected(&dir, expected);
    };
    let good = safetensors_file(&[], &[tensor("t", "BF16", &[64, 64], &common::weights(4096, 1))]);
    let other = safetensors_file(&[], &[tensor("u", "BF16", &[64, 64], &common::weights(4096, 2))]);
    case("none", &[("config.json", b"{}".to_vec())], &["no *.safetensors"]);
    case("short", &[("a.safetensors", vec![1, 2, 3])], &["a.safetensors", "3 bytes hold no header"]);
    case("huge", &[("a.safetensors", vec![0xff; 64])], &["a.safetensors", "above the limit of 25000000"]);
    case("cut", &[("a.safetensors", good[..good.len() - 1].to_vec())], &["a.safetensors", "truncated"]);
    case("long", &[("a.safetensors", [&good[..], &[0]].concat())], &["a.safetensors", "too long"]);
    let mut damaged = good.clone();
    damaged[8] = b'[';
    case("json", &[("a.safetensors", damaged)], &["a.safetensors", "at byte"]);
    let reserved = safetensors_file(&[], &[tensor("x.unweight.palette", "U8", &[1], &[1])]);
    case("reserved", &[("a.safetensors", reserved)], &["a.safetensors", "x.unweight.palette", "reserved"]);
    case("manifest", &[("a.safetensors", good.clone()), ("unweight.json", vec![])], &["unweight.json", "reserved"]);
    let index = |entries: &[(&str, &str)]| {
        let map: BTreeMap<_, _> = entries.iter().copied().collect();
        serde_json::to_vec(&serde_json::json!({ "metadata": {}, "weight_map": map })).unwrap()
    };
    let (one, two, three) =
        ("m-00001-of-00002.safetensors", "m-00002-of-00002.safetensors", "m-00003-of-00002.safetensors");
    let with = |entries: &[(&str, &str)], shards: &[&str]| {
        let mut files: Vec<(String, Vec<u8>)> = vec![("m.safetensors.index.json".into(), index(entries))];
        for shard in shards {
            files.push((shard.to_string(), if *shard == one { good.clone() } else { other.clone() }));
        }
        files
    };
    let indexed = |name: &str, entries: &[(&str, &str)], shards: &[&str], expected: &[&str]| {
        let files = with(entries, shards);
        let files: Vec<(&str, Vec<u8>)> = files.iter().map(|(n, b)| (n.as_str(), b.clone())).collect();
        case(name, &files, expected);
    };
    indexed("missing shard", &[("t", one), ("u", two)], &[one], &["index.json", two, "'u'", "missing"]);
    indexed("missing tensor", &[("t", one), ("v", two)], &[one, two], &["'v'", two, "does not contain it"]);
    indexed("unlisted tensor", &[("t", one)], &[one, two], &["'m-00002-of-00002.safetensors'", "not listed"]);
    indexed("wrong shard", &[("t", one), ("u", one)], &[one, two], &["'u'", one, "does not contain it"]);
    indexed("extra shard", &[("t", one), ("u", two)], &[one, two, three], &[three, "not listed"]);
    indexed("path", &[("t", "../x.safetensors")], &[one], &["../x.safetensors", "not a plain file name"]);
    case(
        "index json",
        &[("a.safetensors", good.clone()), ("a.safetensors.index.json", b"{".to_vec())],
        &["index.json", "not a valid"],
    );
    let dir = scratch.path("directory");
    fs::create_dir_all(dir.join("a.safetensors")).unwrap();
    assert_rejected(&dir, &["a.safetensors", "a directory"]);
    assert_rejected(&scratch.path("absent"), &["absent"]);
    fs::write(scratch.path("file"), "x").unwrap();
    assert_rejected(&scratch.path("file"), &["not a directory"]);
}

#[test]
fn outputs_are_not_overwritten_without_force() {
    let scratch = Scratch::new();
    let (source, out) = (scratch.path("model"), scratch.path("out"));
    small_model(&source);
    let options = CompressOptions::default();
    let before = read_tree(&source);
    for inside in [source.clone(), source.join("sub/b"), scratch.dir().to_path_buf()] {
        let forced = options.clone().force(true);
        let error = compress(&source, &inside, &forced, &Silent).unwrap_err();
        assert!(matches!(error, BundleError::OutputOverlaps { .. }), "{error}");
    }
    fs::create_dir(&out).unwrap();
    fs::write(out.join("precious"), "x").unwrap();
    let error = compress(&source, &out, &options, &Silent).unwrap_err();
    assert!(matches!(error, BundleError::OutputExists { .. }), "{error}");
    assert_eq!(fs::read(out.join("precious")).unwrap(), b"x");

    // Force does not replace it either: the file is not known to be disposable.
    let forced = options.clone().force(true);
    let error = compress(&source, &out, &forced, &Silent).unwrap_err();
    assert!(matches!(&error, BundleError::NotReplaceable { file, .. } if file == "precious"), "{error}");
    fs::remove_file(out.join("precious")).unwrap();
    compress(&source, &out, &forced, &Silent).unwrap();
    compress(&source, &out, &forced, &Silent).unwrap();
    assert!(verify(&out, None, &Silent).unwrap().is_ok());
    // A bundle with an additional file.
    fs::write(out.join("precious"), "x").unwrap();
    let error = compress(&source, &out, &forced, &Silent).unwrap_err();
    assert!(matches!(error, BundleError::NotReplaceable { .. }), "{error}");
    fs::remove_file(out.join("precious")).unwrap();
    // The output of decompress can be replaced by decompress, and only by it.
    let (back, forced) = (scratch.path("back"), DecompressOptions::default().force(true));
    decompress(&out, &back, &DecompressOptions::default(), &Silent).unwrap();
    decompress(&out, &back, &forced, &Silent).unwrap();
    fs::write(back.join("precious"), "x").unwrap();
    let error = decompress(&out, &back, &forced, &Silent).unwrap_err();
    assert!(matches!(error, BundleError::NotReplaceable { .. }), "{error}");
    assert!(compress(&source, &back, &options.clone().force(true), &Silent).is_err(), "a model is no bundle");
    assert_eq!(fs::read(back.join("precious")).unwrap(), b"x");

    let partial = scratch.path("second.partial");
    fs::create_dir(&partial).unwrap();
    fs::write(partial.join("mine"), "x").unwrap();
    let error = compress(&source, &scratch.path("second"), &options, &Silent).unwrap_err();
    assert!(matches!(error, BundleError::ForeignPartial { .. }), "{error}");
    assert!(partial.join("mine").exists());
    assert!(read_tree(&source) == before, "the source is never written to");
}

/// Cancels after a number of bytes, and then tries to start a second writer.
struct CancelAfter<F: Fn() + Sync> {
    bytes: u64,
    done: AtomicU64,
    then: F,
}

impl<F: Fn() + Sync> Progress for CancelAfter<F> {
    fn advance(&self, bytes: u64) {
        self.done.fetch_add(bytes, Ordering::Relaxed);
    }

    fn cancelled(&self) -> bool {
        let cancelled = self.done.load(Ordering::Relaxed) >= self.bytes;
        if cancelled {
            (self.then)();
        }
        cancelled
    }
}

#[test]
fn resume_after_interruption_gives_the_same_bytes() {
    let scratch = Scratch::new();
    let (source, out) = (scratch.path("model"), scratch.path("out"));
    demo_model::write(&source, &narrow(2, 512, 4)).unwrap();
    let options = CompressOptions::default();
    compress(&source, &scratch.path("whole"), &options, &Silent).unwrap();
    let total: u64 = read_tree(&source).values().map(|f| f.len() as u64).sum();
    let progress = CancelAfter {
        bytes: total * 6 / 10,
        done: AtomicU64::new(0),
        then: || {
            let error = compress(&source, &out, &options, &Silent).unwrap_err();
            assert!(matches!(error, BundleError::Locked { .. }), "{error}");
        },
    };
    let error = compress(&source, &out, &options, &progress).unwrap_err();
    assert!(matches!(error, BundleError::Interrupted { .. }) && error.remedy() == Some(Remedy::Resume), "{error}");
    assert_eq!(error.class(), ErrorClass::Interrupted);
    assert!(!out.exists());

    // A finished shard whose bytes were damaged since is not taken over.
    let tree = scratch.path("out.partial/tree");
    let finished: Vec<_> = read_tree(&tree).into_keys().filter(|name| name.ends_with(".safetensors")).collect();
    assert!(finished.len() >= 2, "{finished:?}");
    let mut bytes = fs::read(tree.join(&finished[0])).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(tree.join(&finished[0]), bytes).unwrap();

    let report = compress(&source, &out, &options.resume(true), &Silent).unwrap();
    assert_eq!(report.resumed_files, finished[1..]);
    assert!(read_tree(&out) == read_tree(&scratch.path("whole")));

    let progress = CancelAfter { bytes: total * 6 / 10, done: AtomicU64::new(0), then: || {} };
    let back = scratch.path("back");
    let error = decompress(&out, &back, &DecompressOptions::default(), &progress).unwrap_err();
    assert_eq!(error.class(), ErrorClass::Interrupted);
    let resume = DecompressOptions::default().resume(true);
    let report = decompress(&out, &back, &resume, &Silent).unwrap();
    assert!(report.files.iter().any(|f| f.resumed) && report.files.iter().any(|f| !f.resumed));
    assert!(read_tree(&back) == read_tree(&source));
}

#[test]
fn resume_restarts_when_options_or_source_change() {
    let scratch = Scratch::new();
    let (source, out) = (scratch.path("model"), scratch.path("out"));
    demo_model::write(&source, &narrow(1, 512, 3)).unwrap();
    let total: u64 = read_tree(&source).values().map(|f| f.len() as u64).sum();
    let interrupt = || {
        let progress = CancelAfter { bytes: total * 9 / 10, done: AtomicU64::new(0), then: || {} };
        compress(&source, &out, &CompressOptions::default(), &progress).unwrap_err()
    };
    interrupt();
    let other = CompressOptions::new(Profile::Palette).resume(true);
    let report = compress(&source, &out, &other, &Silent).unwrap();
    assert_eq!(report.resumed_files, [""; 0]);
    fs::remove_dir_all(&out).unwrap();

    interrupt();
    // Other weights with the same header.
    let shard = source.join("model-00001-of-00003.safetensors");
    let mut bytes = fs::read(&shard).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 0x55;
    fs::write(&shard, bytes).unwrap();
    let resume = CompressOptions::default().resume(true);
    let report = compress(&source, &out, &resume, &Silent).unwrap();
    assert!(!report.resumed_files.iter().any(|f| f.contains("00001")), "{:?}", report.resumed_files);
    assert!(verify(&out, Some(&source), &Silent).unwrap().is_ok());
}

/// Counts the tensors that this crate's encoder encodes.
struct Counting(AtomicU64);

impl Encoder for Counting {
    fn encode(
        &self,
        matrix: FloatMatrix<'_>,
        encoding: EncodingId,
        limit: CodeLimit,
    ) -> Result<(Digest, StoredTensor<Vec<u8>>), EncoderError> {
        self.0.fetch_add(1, Ordering::Relaxed);
        CpuEncoder.encode(matrix, encoding, limit)
    }
}

fn write_tree(root: &Path, tree: &BTreeMap<String, Vec<u8>>) {
    for (name, bytes) in tree {
        fs::create_dir_all(root.join(name).parent().unwrap()).unwrap();
        fs::write(root.join(name), bytes).unwrap();
    }
}

/// Stores the reasons for starting over.
#[derive(Default)]
struct StartsOver(Mutex<Vec<String>>);

impl Progress for StartsOver {
    fn starts_over(&self, reason: &str) {
        self.0.lock().unwrap().push(reason.to_owned());
    }
}

/// With finished or unfinished shards, a run reports once that it starts over: with other options, or without resuming.
#[test]
fn a_run_says_that_it_starts_over() {
    let scratch = Scratch::new();
    let (source, out, partial) = (scratch.path("model"), scratch.path("out"), scratch.path("out.partial"));
    demo_model::write(&source, &narrow(4, 512, 3)).unwrap();
    let total: u64 = read_tree(&source).values().map(|bytes| bytes.len() as u64).sum();
    let options = CompressOptions::default().ram_bytes(Some(1 << 18));
    for with_finished in [false, true] {
        if with_finished {
            // The other shards are unfinished, because this is the first one that is finished.
            assert!(attacks::crash(scratch.dir(), "compress", "recorded"));
        } else {
            let part = CancelAfter { bytes: total / 8, done: AtomicU64::new(0), then: || () };
            compress(&source, &out, &options, &part).unwrap_err();
        }
        let left = read_tree(&partial);
        let finished = left.keys().any(|name| name.starts_with("records/"));
        assert!(finished == with_finished && left.keys().any(|name| name.starts_with("work/journal-")), "{finished}");
        let other = options.clone().sha256(true).resume(true);
        let cases = [
            (options.clone().resume(true), None),
            (other, Some("had other options")),
            (options.clone(), Some("with the resume option it would have continued")),
        ];
        for (options, expected) in cases {
            let messages = StartsOver::default();
            write_tree(&partial, &left);
            let report = compress(&source, &out, &options, &messages).unwrap();
            let messages = messages.0.into_inner().unwrap();
            let is_new = report.resumed_tensors == 0 && report.resumed_files.is_empty();
            assert_eq!(is_new, expected.is_some(), "{finished}: {messages:?}");
            assert_eq!(messages.len(), usize::from(expected.is_some()), "{finished}: {messages:?}");
            assert!(messages.iter().all(|reason| reason.contains(expected.unwrap_or_default())), "{messages:?}");
            fs::remove_dir_all(&out).unwrap();
        }
    }
}

/// A file is continued: its sound prefix that matches the source is taken over, and nothing else.
#[test]
fn resume_continues_inside_a_file() {
    let scratch = Scratch::new();
    let (source, out, partial) = (scratch.path("model"), scratch.path("out"), scratch.path("out.partial"));
    let model = narrow(4, 512, 1);
    demo_model::write(&source, &model).unwrap();
    let options = CompressOptions::default().ram_bytes(Some(1 << 18)).sha256(true);
    compress(&source, &scratch.path("whole"), &options, &Silent).unwrap();
    let (whole, total) =
        (read_tree(&scratch.path("whole")), fs::metadata(source.join("model.safetensors")).unwrap().len());
    let stop_halfway = |then: fn()| CancelAfter { bytes: total / 2, done: AtomicU64::new(0), then };
    let nothing: fn() = || ();
    compress(&source, &out, &options, &stop_halfway(nothing)).unwrap_err();
    let left = read_tree(&partial);
    let find = |prefix: &str| left.keys().find(|name| name.starts_with(prefix)).unwrap().clone();
    let (shard, journal) = (find("work/shard-"), find("work/journal-"));
    let resume = |options: &CompressOptions, what: &str| {
        let counting = Counting(AtomicU64::new(0));
        let report = compress_with(&source, &out, &options.clone().resume(true), &counting, &Silent).unwrap();
        assert!(!partial.exists(), "{what}");
        let tree = read_tree(&out);
        fs::remove_dir_all(&out).unwrap();
        (tree, report.resumed_tensors, counting.0.into_inner() + report.resumed_tensors)
    };
    let (tree, kept, all) = resume(&options, "as it was left");
    assert!(tree == whole && kept > 4, "{kept}");
    // Norms are not encoded.
    assert!((30..kept + 40).contains(&all), "{all}");
    let mut damages: Vec<(String, BTreeMap<String, Vec<u8>>)> = Vec::new();
    let mut damage = |what: &str, name: &str, change: &dyn Fn(&mut Vec<u8>)| {
        let mut tree = left.clone();
        change(tree.get_mut(name).unwrap());
        damages.push((what.into(), tree));
    };
    damage("the shard's last byte", &shard, &|bytes| *bytes.last_mut().unwrap() ^= 1);
    damage("the shard's middle", &shard, &|bytes| {
        let at = bytes.len() / 2;
        bytes[at] ^= 1
    });
    damage("a shard that is cut off", &shard, &|bytes| bytes.truncate(bytes.len() / 3));
    damage("a shard that goes on", &shard, &|bytes| bytes.extend([7; 5000]));
    damage("an empty shard", &shard, &|bytes| bytes.clear());
    damage("a journal that is cut off", &journal, &|bytes| bytes.truncate(bytes.len() / 2 + 3));
    damage("the journal's middle", &journal, &|bytes| {
        let at = bytes.len() / 2;
        bytes[at] ^= 1
    });
    damage("the journal's head", &journal, &|bytes| bytes[50] ^= 1);
    damage("an empty journal", &journal, &|bytes| bytes.clear());
    for name in [&shard, &journal] {
        let mut tree = left.clone();
        tree.remove(name);
        damages.push((format!("without {name}"), tree));
    }
    for (what, tree) in damages {
        write_tree(&partial, &tree);
        let (tree, less, _) = resume(&options, &what);
        assert!(tree == whole, "{what}");
        assert!(less < kept || what == "a shard that goes on" || what == "the shard's last byte", "{what}: {less}");
    }
    // Nothing is taken over from other options or another source.
    write_tree(&partial, &left);
    let other = options.clone().sha256(false);
    assert_eq!(resume(&other, "other options").1, 0);
    demo_model::write(&scratch.path("other"), &DemoOptions { seed: 7, ..model }).unwrap();
    write_tree(&source, &read_tree(&scratch.path("other")));
    write_tree(&partial, &left);
    let (tree, _, _) = resume(&options, "another source");
    compress(&source, &out, &options, &Silent).unwrap();
    assert!(tree == read_tree(&out), "another source");

    // The same for decompression.
    let (back, partial) = (scratch.path("back"), scratch.path("back.partial"));
    let options = DecompressOptions::default().ram_bytes(Some(1 << 18));
    decompress(&out, &back, &options, &stop_halfway(nothing)).unwrap_err();
    let left = read_tree(&partial);
    let begun = left.keys().find(|name| name.starts_with("work/shard-")).unwrap();
    for (what, at) in [("as it was left", None), ("the header", Some(9)), ("the middle", Some(left[begun].len() / 2))] {
        let mut tree = left.clone();
        if let Some(at) = at {
            tree.get_mut(begun).unwrap()[at] ^= 1;
        }
        write_tree(&partial, &tree);
        let report = decompress(&out, &back, &options.clone().resume(true), &Silent).unwrap();
        let file = report.files.iter().find(|file| file.name == "model.safetensors").unwrap();
        assert!(!file.resumed && file.resumed_bytes < file.bytes, "{what}");
        match what {
            "the header" => assert_eq!(file.resumed_bytes, 0),
            _ => assert!(file.resumed_bytes > total / 8, "{what}: {}", file.resumed_bytes),
        }
        assert!(read_tree(&back) == read_tree(&source), "{what}");
        assert!(!partial.exists());
        fs::remove_dir_all(&back).unwrap();
    }
}

#[test]
fn file_modes_and_times_are_restored() {
    use std::{
        os::unix::fs::PermissionsExt,
        time::{Duration, SystemTime},
    };
    let scratch = Scratch::new();
    let (source, bundle, back) = (scratch.path("model"), scratch.path("bundle"), scratch.path("back"));
    small_model(&source);
    let names: Vec<String> = read_tree(&source).into_keys().collect();
    let mode_and_time = |root: &Path, name: &str| {
        let metadata = fs::metadata(root.join(name)).unwrap();
        (metadata.permissions().mode() & 0o7777, metadata.modified().unwrap())
    };
    for (i, name) in names.iter().enumerate() {
        let file = fs::File::options().write(true).open(source.join(name)).unwrap();
        file.set_modified(SystemTime::UNIX_EPOCH + Duration::new(1_000_000_000 + i as u64, 123_000_000)).unwrap();
        // The umask does not affect the user's own permissions.
        let mode = [0o600, 0o700, 0o400, 0o4700][i % 4];
        file.set_permissions(fs::Permissions::from_mode(mode)).unwrap();
    }
    compress(&source, &bundle, &CompressOptions::default(), &Silent).unwrap();
    decompress(&bundle, &back, &DecompressOptions::default(), &Silent).unwrap();
    for name in &names {
        let (mode, modified) = mode_and_time(&source, name);
        // The setuid bit is not restored.
        assert_eq!(mode_and_time(&back, name), (mode & 0o777, modified), "{name}");
    }
    // The bytes of a bundle do not depend on modes and times.
    let tree = read_tree(&bundle);
    fs::remove_dir_all(&bundle).unwrap();
    names.iter().for_each(|name| fs::set_permissions(source.join(name), fs::Permissions::from_mode(0o644)).unwrap());
    compress(&source, &bundle, &CompressOptions::default(), &Silent).unwrap();
    assert!(read_tree(&bundle) == tree);
}

/// Sums the announced and the completed bytes.
#[derive(Default)]
struct Sums {
    announced: AtomicU64,
    done: AtomicU64,
}

impl Progress for Sums {
    fn start(&self, total_bytes: u64) {
        self.announced.fetch_add(total_bytes, Ordering::Relaxed);
    }

    fn advance(&self, bytes: u64) {
        self.done.fetch_add(bytes, Ordering::Relaxed);
    }
}

#[test]
fn progress_ends_at_the_announced_total() {
    let scratch = Scratch::new();
    let (source, bundle) = (scratch.path("source"), scratch.path("bundle"));
    // One tensor is larger than the limit of those copied as a whole.
    demo_model::write(&source, &narrow(2, 512, 2)).unwrap();
    let header = r#"{"big":{"dtype":"F32","shape":[18000000],"data_offsets":[0,72000000]}}"#;
    let big = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &vec![1; 72_000_000]].concat();
    fs::write(source.join("zz-big.safetensors"), big).unwrap();
    let check = |what: &str, work: &dyn Fn(&Sums)| {
        let sums = Sums::default();
        work(&sums);
        let (announced, done) = (sums.announced.into_inner(), sums.done.into_inner());
        assert!(announced > 72_000_000, "{what}");
        assert_eq!(announced, done, "{what}");
    };
    for verify in [VerifyAfter::None, VerifyAfter::Sample, VerifyAfter::Full] {
        let options = CompressOptions::default().verify(verify).force(true);
        check(verify.name(), &|sums| drop(compress(&source, &bundle, &options, sums).unwrap()));
    }
    check("verify", &|sums| assert!(verify(&bundle, None, sums).unwrap().is_ok()));
    check("against", &|sums| assert!(verify(&bundle, Some(&source), sums).unwrap().is_ok()));
    let back = scratch.path("back");
    check("decompress", &|sums| drop(decompress(&bundle, &back, &DecompressOptions::default(), sums).unwrap()));
}
