//! Compares DFloat11 with the output of its own package (`fixtures/dfloat11/make.py`) and with the oracle, and damages
//! data.

use std::{
    collections::{BTreeMap, HashMap},
    fs,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

use proptest::prelude::*;
use serde_json::Value;
use sha2::{Digest as _, Sha256};
use unweight_format::{
    Histogram,
    bundle::{self, BundleError, CompressOptions, Progress, Silent},
    safetensors::{Header, SOURCE_HEADER_MAX},
    testing::{
        Random,
        demo_model::{self, DemoOptions},
    },
};
use unweight_rivals::dfloat11::{
    Code, ConvertError, ConvertOptions, Encoder, NotEncodable, Sizes, THREADS, Unit, UnitError, convert, is_model,
    oracle, restore,
};

/// A change that a test makes to files.
type Change<'a> = &'a dyn Fn(&mut Files);

/// Names and contents of files.
type Files = BTreeMap<String, Vec<u8>>;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/dfloat11").join(name)
}

fn json(name: &str) -> Value {
    serde_json::from_slice(&fs::read(fixture(name)).unwrap()).unwrap()
}

/// Returns the tensors of a safetensors file.
fn tensors(path: &Path) -> HashMap<String, (Vec<usize>, Vec<u8>)> {
    let bytes = fs::read(path).unwrap();
    let header = Header::parse(&bytes, bytes.len() as u64, SOURCE_HEADER_MAX).unwrap();
    let of = |tensor: &unweight_format::safetensors::TensorInfo| {
        bytes[tensor.offset as usize..(tensor.offset + tensor.bytes) as usize].to_vec()
    };
    header.tensors.iter().map(|tensor| (tensor.name.clone(), (tensor.shape.clone(), of(tensor)))).collect()
}

/// Returns the relative names and the contents of all files.
fn tree(root: &Path) -> Files {
    unweight_format::raw::walk(root).unwrap().into_iter().map(|(name, path)| (name, fs::read(path).unwrap())).collect()
}

/// Returns the units of the fixture.
fn units() -> Vec<Unit> {
    let files = ["lm_head", "model.embed_tokens", "model.layers.0", "model.layers.1"];
    let unit = |name: &str| {
        let mut all = tensors(&fixture("model").join(format!("{}.safetensors", name.replace('.', "_"))));
        let mut take = |section: &str| all.remove(&format!("{name}.{section}")).unwrap().1;
        Unit {
            luts: take("luts"),
            encoded_exponent: take("encoded_exponent"),
            sign_mantissa: take("sign_mantissa"),
            output_positions: take("output_positions"),
            gaps: take("gaps"),
            threads: THREADS,
        }
    };
    files.map(unit).into()
}

/// Returns weights whose exponents are spread over `spread` values, with runs of one value.
fn weights(seed: u64, count: usize, spread: u64) -> Vec<u8> {
    let mut random = Random::new(seed);
    let element = |random: &mut Random| {
        // The minimum of several draws, so that rare exponents get long codes.
        let exponent = (0..4).map(|_| random.below(spread)).min().unwrap_or(0) as u16;
        ((random.below(2) as u16) << 15 | (100 + exponent) << 7 | random.below(128) as u16).to_le_bytes()
    };
    (0..count).flat_map(|_| element(&mut random)).collect()
}

#[test]
fn codes_and_tables_match_the_package() {
    let (mut ties, mut failed) = (0, 0);
    for case in json("codes.json").as_array().unwrap() {
        let mut counts = Histogram::default();
        for pair in case["counts"].as_array().unwrap() {
            counts.add(pair[0].as_u64().unwrap() as u8, pair[1].as_u64().unwrap());
        }
        let luts = Code::of(&counts).and_then(|code| code.luts().map(|luts| (code, luts)));
        if case.get("error").is_some() {
            assert_eq!(luts.unwrap_err(), NotEncodable::NoFirst);
            failed += 1;
            continue;
        }
        let (code, luts) = match luts {
            Err(NotEncodable::Tie { count }) => {
                assert!((0..=255).filter(|&exponent| counts.count(exponent) == count).count() > 1);
                ties += 1;
                continue;
            }
            luts => luts.unwrap(),
        };
        for word in case["codes"].as_array().unwrap() {
            let got = match word[0].as_i64().unwrap() {
                -1 => code.end().unwrap(),
                exponent => code.word(exponent as u8),
            };
            assert_eq!(
                (u64::from(got.bits), u64::from(got.value)),
                (word[1].as_u64().unwrap(), word[2].as_u64().unwrap())
            );
        }
        let number = |value: &Value| value.as_u64().unwrap() as u8;
        let rows = case["luts"].as_array().unwrap().iter().flat_map(|row| row.as_array().unwrap());
        let expected: Vec<u8> = rows.flat_map(|run| vec![number(&run[0]); run[1].as_u64().unwrap() as usize]).collect();
        assert_eq!(luts, expected);
        let read = Code::parse(&luts).unwrap();
        (0..=255).for_each(|exponent| assert_eq!(read.word(exponent), code.word(exponent)));
    }
    assert_eq!((ties, failed), (2, 1), "cases that the package decides at random, and cases that it fails on");
}

#[test]
fn package_units_decode_and_encode_to_the_same_bytes() {
    let units = units();
    for unit in &units {
        let weights = unit.decode().unwrap();
        assert_eq!(oracle::decode(unit).unwrap(), weights);
        assert_eq!(&Unit::encode(&weights, THREADS).unwrap(), unit);
        assert_eq!(&oracle::encode(&weights, THREADS).unwrap(), unit);
    }
    // Layer 1 has codes of all lengths up to 20 bits, which span three bytes.
    let rows = |unit: &Unit| unit.luts.len() / 256 - 1;
    assert!(rows(&units[3]) >= 3 && units.iter().any(|unit| unit.output_positions.len() > 12));
}

#[test]
fn package_directory_round_trips() {
    let home = tempfile::tempdir().unwrap();
    let (plain, again) = (home.path().join("plain"), home.path().join("again"));
    assert!(is_model(&fixture("model")).unwrap() && !is_model(home.path()).unwrap());
    let report = restore(&fixture("model"), &plain, false, &Silent).unwrap();
    assert_eq!((report.units, report.weights, report.kept_tensors), (4, 16, 3));
    let mut all = HashMap::new();
    for (name, _) in tree(&plain).iter().filter(|(name, _)| name.ends_with(".safetensors")) {
        all.extend(tensors(&plain.join(name)));
    }
    let expected = json("weights.json");
    for (name, weight) in expected.as_object().unwrap() {
        let (shape, bytes) = &all[name];
        assert_eq!(serde_json::json!(shape), weight["shape"], "{name}");
        let sha: String = Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(sha, weight["sha256"].as_str().unwrap(), "{name}");
    }
    assert_eq!(all.len(), expected.as_object().unwrap().len());
    let index: Value = serde_json::from_slice(&fs::read(plain.join("model.safetensors.index.json")).unwrap()).unwrap();
    assert_eq!(index["weight_map"].as_object().unwrap().len(), all.len());
    let config = fs::read_to_string(plain.join("config.json")).unwrap();
    assert!(config.contains("hidden_size") && !config.contains("dfloat11"));

    // From the model, and from a bundle of the model.
    let bundle_dir = home.path().join("bundle");
    bundle::compress(&plain, &bundle_dir, &CompressOptions::default(), &Silent).unwrap();
    for source in [&plain, &bundle_dir] {
        let report = convert(source, &again, ConvertOptions::default(), &Silent).unwrap();
        assert_eq!((report.units, report.weights, report.kept.len()), (4, 16, 0));
        assert!(report.unit_bytes * 100 < report.unit_source_bytes * 80);
        let (made, stock) = (tree(&again), tree(&fixture("model")));
        assert_eq!(made.keys().collect::<Vec<_>>(), stock.keys().collect::<Vec<_>>());
        for (name, bytes) in
            stock.iter().filter(|(name, _)| name.ends_with(".safetensors") && *name != "model.safetensors")
        {
            assert!(&made[name] == bytes, "{name}: the bytes differ from those of the package");
        }
        let key = |config: &[u8]| serde_json::from_slice::<Value>(config).unwrap()["dfloat11_config"].clone();
        let (made, stock) = (key(&made["config.json"]), key(&stock["config.json"]));
        assert_eq!(made, stock);
        fs::remove_dir_all(&again).unwrap();
    }
}

#[test]
fn model_round_trips_tensor_by_tensor() {
    let home = tempfile::tempdir().unwrap();
    let [model, made, plain] = ["model", "made", "plain"].map(|name| home.path().join(name));
    let demo = DemoOptions {
        layers: 3,
        hidden: 128,
        intermediate: 192,
        heads: 4,
        kv_heads: 2,
        vocab: 512,
        ..DemoOptions::default()
    };
    demo_model::write(&model, &demo).unwrap();
    let report = convert(&model, &made, ConvertOptions::default(), &Silent).unwrap();
    assert!(report.units >= 3, "{report:?}");
    restore(&made, &plain, false, &Silent).unwrap();
    let all = |root: &Path| -> BTreeMap<_, _> {
        let files = tree(root).into_keys().filter(|name| name.ends_with(".safetensors"));
        files.flat_map(|name| tensors(&root.join(name))).collect()
    };
    assert_eq!(all(&plain), all(&model));
    assert_eq!(fs::read(plain.join("config.json")).unwrap(), fs::read(model.join("config.json")).unwrap());
}

#[test]
fn unsupported_weights_are_named() {
    let encode = |weights: &[u16]| {
        let bytes: Vec<u8> = weights.iter().flat_map(|weight| weight.to_le_bytes()).collect();
        let error = Unit::encode(&bytes, THREADS).unwrap_err();
        assert_eq!(oracle::encode(&bytes, THREADS).unwrap_err(), error);
        error
    };
    assert_eq!(encode(&[]), NotEncodable::Empty);
    assert_eq!(encode(&[0x3f80; 9]), NotEncodable::NoFirst);
    assert_eq!(encode(&[0x3f80, 0x3f00, 0x7f80, 0xffc1]), NotEncodable::Exponent { exponent: 255, count: 2 });
    assert_eq!(encode(&[0x3f80, 240 << 7]), NotEncodable::Exponent { exponent: 240, count: 1 });
    let mut counts = Histogram::default();
    (0..31).for_each(|i| counts.add(i, 3 << i));
    let code = Code::of(&counts).unwrap();
    assert_eq!(
        Sizes::of(&code, &counts, THREADS).unwrap_err(),
        NotEncodable::Count { what: "elements", got: counts.total() }
    );
}

#[test]
fn module_that_does_not_fit_stays_bf16() {
    let home = tempfile::tempdir().unwrap();
    let [plain, made, back] = ["plain", "made", "back"].map(|name| home.path().join(name));
    restore(&fixture("model"), &plain, false, &Silent).unwrap();
    // The head contains an infinity.
    let index: Value = serde_json::from_slice(&fs::read(plain.join("model.safetensors.index.json")).unwrap()).unwrap();
    let file = plain.join(index["weight_map"]["lm_head.weight"].as_str().unwrap());
    let mut bytes = fs::read(&file).unwrap();
    let header = Header::parse(&bytes, bytes.len() as u64, SOURCE_HEADER_MAX).unwrap();
    let at = header.tensors.iter().find(|tensor| tensor.name == "lm_head.weight").unwrap().offset as usize;
    bytes[at..at + 2].copy_from_slice(&0x7f80u16.to_le_bytes());
    fs::write(&file, &bytes).unwrap();
    let report = convert(&plain, &made, ConvertOptions::default(), &Silent).unwrap();
    assert_eq!((report.units, report.kept.len()), (3, 1));
    assert_eq!(report.kept[0].unit, "lm_head");
    assert!(report.kept[0].reason.contains("exponent 255"), "{}", report.kept[0].reason);
    restore(&made, &back, false, &Silent).unwrap();
    let head = |root: &Path| {
        let files = tree(root).into_keys().filter(|name| name.ends_with(".safetensors"));
        files.flat_map(|name| tensors(&root.join(name))).find(|(name, _)| name == "lm_head.weight").unwrap().1
    };
    assert_eq!(head(&back), head(&plain));
}

/// No code begins in the last block: the last code begins in the block before, and ends at a byte boundary.
#[test]
fn last_block_without_codes_round_trips() {
    let mut checked = 0;
    for seed in 0..4000 {
        let weights = weights(seed, 16 + seed as usize % 48, 12);
        let Ok(unit) = Unit::encode(&weights, 1) else { continue };
        assert_eq!(unit, oracle::encode(&weights, 1).unwrap());
        assert_eq!(unit.decode().unwrap(), weights);
        let positions = unit.output_positions.len();
        if unit.output_positions[positions - 8..positions - 4] != unit.output_positions[positions - 4..] {
            continue;
        }
        // The package omits the last position if the codes end at a byte boundary.
        let mut short = unit.clone();
        short.output_positions.truncate(positions - 4);
        assert_eq!(short.decode().unwrap(), weights);
        checked += 1;
    }
    assert!(checked > 10, "{checked}");
}

/// One damaged byte causes an error, or decodes to the same weights as with the oracle.
#[test]
fn damaged_bytes_are_errors_or_decode_as_the_oracle() {
    let weights = weights(5, 3000, 40);
    let unit = Unit::encode(&weights, 8).unwrap();
    let mut random = Random::new(7);
    let (mut errors, mut same) = ([0u32; 5], 0);
    for round in 0..20_000 {
        let mut damaged = unit.clone();
        let section_index = round % 5;
        let section = match section_index {
            0 => &mut damaged.luts,
            1 => &mut damaged.encoded_exponent,
            2 => &mut damaged.output_positions,
            3 => &mut damaged.gaps,
            _ => &mut damaged.sign_mantissa,
        };
        let at = random.below(section.len() as u64) as usize;
        match random.below(8) {
            0 => _ = section.pop(),
            1 => section.push(0),
            2 => section[at] = 255,
            3 => section[at] = 0,
            _ => section[at] ^= 1 << random.below(8),
        }
        match damaged.decode() {
            Ok(got) => {
                assert_eq!(oracle::decode(&damaged).as_ref(), Some(&got));
                same += u32::from(got == weights);
            }
            Err(_) => errors[section_index] += 1,
        }
    }
    // All signs and mantissas are valid; in the other sections most damage is detected.
    assert!(errors[..4].iter().all(|&count| count > 1500), "{errors:?}");
    assert!(same > 100, "{same}");
}

#[test]
fn each_fault_of_a_unit_has_its_error() {
    let unit = Unit::encode(&weights(5, 3000, 40), 8).unwrap();
    let error_after = |change: fn(&mut Unit)| {
        let mut changed = unit.clone();
        change(&mut changed);
        changed.decode().unwrap_err()
    };
    assert!(matches!(error_after(|unit| unit.threads = 0), UnitError::Threads { got: 0 }));
    assert!(matches!(error_after(|unit| unit.threads = 5000), UnitError::Threads { got: 5000 }));
    assert!(matches!(
        error_after(|unit| unit.encoded_exponent.clear()),
        UnitError::Count { section: "encoded_exponent", .. }
    ));
    assert!(matches!(
        error_after(|unit| unit.sign_mantissa.clear()),
        UnitError::Count { section: "sign_mantissa", .. }
    ));
    assert!(matches!(error_after(|unit| unit.luts.truncate(256)), UnitError::Size { section: "luts", .. }));
    assert!(matches!(error_after(|unit| unit.luts.resize(256 * 19, 0)), UnitError::Size { section: "luts", .. }));
    assert!(matches!(error_after(|unit| _ = unit.gaps.pop()), UnitError::Size { section: "gaps", .. }));
    assert!(matches!(
        error_after(|unit| unit.output_positions.push(0)),
        UnitError::Size { section: "output_positions", .. }
    ));
    assert!(matches!(error_after(|unit| unit.output_positions[3] = 1), UnitError::Position { block: 0, .. }));
    assert!(matches!(error_after(|unit| unit.output_positions[7] = 255), UnitError::Position { block: 1, .. }));
    assert!(matches!(
        error_after(|unit| unit.output_positions[4] ^= 1),
        UnitError::Position { .. } | UnitError::Gap { .. }
    ));
    assert!(matches!(error_after(|unit| unit.gaps[0] = 255), UnitError::Gap { window: 0, .. }));
    assert!(matches!(error_after(|unit| *unit.luts.last_mut().unwrap() = 3), UnitError::Luts { .. }));
    assert!(matches!(error_after(|unit| unit.luts[0] = 250), UnitError::Luts { row: 0, entry: 0, .. }));
    assert!(matches!(error_after(|unit| _ = unit.sign_mantissa.pop()), UnitError::Position { .. }));
    // A row that jumps to itself, and one that no jump leads to.
    let rows = |first: u8| [vec![first; 256], vec![0; 256], vec![0; 256]].concat();
    for first in [255, 254, 241, 0] {
        assert!(matches!(Code::parse(&rows(first)), Err(UnitError::Luts { .. })) || first == 255);
    }
}

#[test]
fn each_fault_of_a_directory_names_file_and_tensor() {
    let home = tempfile::tempdir().unwrap();
    let (source, output) = (home.path().join("source"), home.path().join("out"));
    let stock = tree(&fixture("model"));
    let error_after = |change: Change<'_>| {
        let mut files = stock.clone();
        change(&mut files);
        _ = fs::remove_dir_all(&source);
        fs::create_dir_all(&source).unwrap();
        files.iter().for_each(|(name, bytes)| fs::write(source.join(name), bytes).unwrap());
        let error = restore(&source, &output, false, &Silent).unwrap_err();
        assert!(!output.exists());
        let mut text = error.to_string();
        let mut cause = std::error::Error::source(&error);
        while let Some(error) = cause {
            text.push_str(&format!(": {error}"));
            cause = error.source();
        }
        text
    };
    let replace = |from: &'static str, to: &'static str| {
        move |files: &mut Files| {
            for bytes in files.values_mut() {
                let positions: Vec<usize> = bytes
                    .windows(from.len())
                    .enumerate()
                    .filter(|(_, w)| *w == from.as_bytes())
                    .map(|(at, _)| at)
                    .collect();
                positions.iter().for_each(|&at| bytes[at..at + to.len()].copy_from_slice(to.as_bytes()));
            }
        }
    };
    let swap_sections = |files: &mut Files| {
        let bytes = files.get_mut("lm_head.safetensors").unwrap();
        for (from, to) in
            [("lm_head.gaps", "lm_head.????"), ("lm_head.luts", "lm_head.gaps"), ("lm_head.????", "lm_head.luts")]
        {
            let at = bytes.windows(from.len()).position(|window| window == from.as_bytes()).unwrap();
            bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
        }
    };
    let remove_a_layer = |files: &mut Files| {
        files.remove("model_layers_1.safetensors").unwrap();
        let config = String::from_utf8(files["config.json"].clone()).unwrap();
        let config = config.replacen('{', "{\"num_hidden_layers\": 2,", 1);
        files.insert("config.json".into(), config.into());
    };
    let cases: [(Change<'_>, &[&str]); 14] = [
        (&remove_a_layer, &["config.json", "2 layers", "no file has a tensor of layer 1", "fetch"]),
        // Only `config.json` stores the number of threads per block.
        (&replace("512", "256"), &["config.json", "threads_per_block is 256", "all units match 512", "fetch"]),
        (&replace("512", "999"), &["config.json", "threads_per_block is 999", "all units match 512", "fetch"]),
        (&replace("512", "  0"), &["config.json", "threads_per_block is 0", "1 to 1024", "fetch"]),
        (&swap_sections, &["lm_head.safetensors", "unit 'lm_head' at byte", "gaps: 768 bytes, expected 320"]),
        (&replace("dfloat11_config", "dfloat12_config"), &["config.json", "no dfloat11_config"]),
        (&replace("lm_head.luts", "lm_head.lutz"), &["lm_head.safetensors", "'lm_head.luts'", "missing"]),
        (&replace(".encoded_exponent", ".encoded_exponenT"), &["no DFloat11 units"]),
        (&replace("\"hidden_size\": 64", "\"hidden_size\": 60"), &["config.json", "hidden_size 60"]),
        (&replace("\"vocab_size\": 128", "\"vocab_size\": 127"), &["vocab_size is 127", "lm_head.weight"]),
        (&replace("\"lm_head\": [", "\"lm_heax\": ["), &["no pattern for the unit 'lm_head'"]),
        (&replace("mlp.up_proj", "mlp.xx_proj"), &["model.layers.0.mlp.xx_proj.weight", "shape"]),
        (&|files| _ = files.get_mut("lm_head.safetensors").unwrap().pop(), &["lm_head.safetensors", "truncated"]),
        (
            &|files| {
                let bytes = files["lm_head.safetensors"].clone();
                files.insert("another.safetensors".into(), bytes);
            },
            &["lm_head.safetensors", "also in another file"],
        ),
    ];
    for (change, words) in cases {
        let text = error_after(change);
        assert!(words.iter().all(|word| text.contains(word)), "{words:?}: {text}");
    }
    // Damage within a section.
    let damage = |tensor: &'static str, byte: usize| {
        move |files: &mut Files| {
            let bytes = files.get_mut("model_layers_0.safetensors").unwrap();
            let header = Header::parse(bytes, bytes.len() as u64, SOURCE_HEADER_MAX).unwrap();
            let at = header.tensors.iter().find(|t| t.name == format!("model.layers.0.{tensor}")).unwrap().offset;
            bytes[at as usize + byte] ^= 0x10;
        }
    };
    for (tensor, byte, word) in [
        ("luts", 0, "luts, row 0"),
        ("encoded_exponent", 5000, "encoded_exponent"),
        ("output_positions", 5, "output_positions"),
        ("gaps", 7, "gaps, window"),
        ("split_positions", 5, "split_positions"),
    ] {
        let text = error_after(&damage(tensor, byte));
        assert!(text.contains("model_layers_0.safetensors") && text.contains("model.layers.0"), "{tensor}: {text}");
        assert!(text.contains(word) || tensor != "luts" && text.contains("gaps"), "{tensor}: {text}");
        // The offset is that of the section that does not match, which need not be the damaged one.
        let Some((location, cause)) = text.split_once(": damaged, or not written by DFloat11; fetch the file again: ")
        else {
            continue;
        };
        let named = format!("model.layers.0.{}", cause.split([',', ':']).next().unwrap());
        let file = &stock["model_layers_0.safetensors"];
        let header = Header::parse(file, file.len() as u64, SOURCE_HEADER_MAX).unwrap();
        let offset = header.tensors.iter().find(|t| t.name == named).unwrap().offset;
        assert!(location.ends_with(&format!("at byte {offset}")), "{tensor}: {text}");
    }
}

/// A DFloat11 directory with an invalid `config.json` must not be mistaken for a model of byte tensors.
#[test]
fn units_without_a_valid_config_are_rejected() {
    let home = tempfile::tempdir().unwrap();
    let stock = tree(&fixture("model"));
    let model = |change: Change<'_>| {
        let mut files = stock.clone();
        change(&mut files);
        let root = home.path().join("model");
        _ = fs::remove_dir_all(&root);
        for (name, bytes) in &files {
            fs::create_dir_all(root.join(name).parent().unwrap()).unwrap();
            fs::write(root.join(name), bytes).unwrap();
        }
        is_model(&root)
    };
    let config = String::from_utf8(stock["config.json"].clone()).unwrap();
    let replace_config =
        |text: String| move |files: &mut Files| _ = files.insert("config.json".into(), text.clone().into());
    let cut = config.find("pattern_dict").unwrap();
    let comma = config.find(",\n  \"dfloat11_config\"").unwrap();
    let cases: [(Change<'_>, String); 6] = [
        (&replace_config(config[..cut].into()), format!("byte {cut}: the JSON object ends")),
        (
            &replace_config(format!("{} {}", &config[..comma], &config[comma + 1..])),
            format!("byte {}: not valid", comma + 4),
        ),
        (&replace_config(String::new()), "byte 0: the JSON object ends".into()),
        (&replace_config("{\"hidden_size\": 64}".into()), "has no dfloat11_config".into()),
        (&replace_config(" ".repeat((16 << 20) + 1)), "more than 16 MiB".into()),
        (&|files| _ = files.remove("config.json"), "config.json: missing".into()),
    ];
    for (change, reason) in &cases {
        let error = model(change).unwrap_err().to_string();
        let unit = "lm_head.safetensors has the DFloat11 unit 'lm_head'; fetch config.json again";
        assert!(error.contains("model/config.json: ") && error.contains(reason) && error.contains(unit), "{error}");
        let (model, out) = (home.path().join("model"), home.path().join("out"));
        let error = convert(&model, &out, ConvertOptions::default(), &Silent).unwrap_err().to_string();
        assert!(error.contains("model/config.json: ") && error.contains(unit) && !out.exists(), "{error}");
    }
    // The key exists, so errors inside it are reported later.
    assert!(model(&replace_config(config.replace("\"threads_per_block\":", "\"threads_per_block\""))).unwrap());
    let error = restore(&home.path().join("model"), &home.path().join("out"), false, &Silent).unwrap_err().to_string();
    let at = config.find("\"threads_per_block\":").unwrap() + "\"threads_per_block\"".len();
    assert!(error.contains(&format!("config.json: dfloat11_config, byte {}", at + 1)), "{error}");
    assert!(error.contains("expected `:`; fetch the model again"), "{error}");

    // Other models are not rejected here: no unit has all of its sections, the weights are not units, or they are in a
    // subfolder.
    let break_config = |files: &mut Files| _ = files.insert("config.json".into(), b"{".into());
    let remove_luts = |files: &mut Files| {
        break_config(files);
        for bytes in files.values_mut() {
            while let Some(at) = bytes.windows(5).position(|window| window == b".luts") {
                bytes[at + 4] = b'z';
            }
        }
    };
    let move_to_subfolder = |files: &mut Files| {
        *files =
            std::mem::take(files).into_iter().map(|(name, bytes)| (format!("transformer/{name}"), bytes)).collect();
    };
    let others: [Change<'_>; 3] =
        [&remove_luts, &move_to_subfolder, &|files| files.retain(|name, _| name == "model.safetensors")];
    for (index, change) in others.into_iter().enumerate() {
        assert!(!model(change).unwrap(), "{index}");
    }
}

/// Requests a stop after this many bytes.
struct StopAfter(AtomicU64, u64);

impl Progress for StopAfter {
    fn advance(&self, bytes: u64) {
        self.0.fetch_add(bytes, Ordering::Relaxed);
    }

    fn cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed) > self.1
    }
}

#[test]
fn interrupted_conversion_resumes() {
    let home = tempfile::tempdir().unwrap();
    let at = |name: &str| home.path().join(name);
    restore(&fixture("model"), &at("plain"), false, &Silent).unwrap();
    convert(&at("plain"), &at("made"), ConvertOptions::default(), &Silent).unwrap();
    let (plain, made) = (tree(&at("plain")), tree(&at("made")));
    for bytes in [0, 10_000, 40_000, 90_000, 120_000] {
        let stop = StopAfter(AtomicU64::new(0), bytes);
        let error = restore(&fixture("model"), &at("again"), false, &stop).unwrap_err();
        assert!(matches!(error, ConvertError::Bundle(BundleError::Interrupted { .. })), "{error:?}");
        assert!(!at("again").exists());
        restore(&fixture("model"), &at("again"), true, &Silent).unwrap();
        assert_eq!(tree(&at("again")), plain);
        fs::remove_dir_all(at("again")).unwrap();

        let stop = StopAfter(AtomicU64::new(0), 2 * bytes);
        assert!(convert(&at("plain"), &at("again"), ConvertOptions::default(), &stop).is_err());
        // A resumed run checks finished files: one that changed meanwhile is written again.
        let finished = unweight_format::raw::walk(&at("again.partial/tree")).unwrap();
        if let Some((_, path)) = finished.first() {
            let mut bytes = fs::read(path).unwrap();
            *bytes.last_mut().unwrap() ^= 1;
            fs::write(path, bytes).unwrap();
        }
        convert(&at("plain"), &at("again"), ConvertOptions::default().resume(true), &Silent).unwrap();
        assert_eq!(tree(&at("again")), made);
        fs::remove_dir_all(at("again")).unwrap();
    }
    let exists_error = convert(&at("plain"), &at("made"), ConvertOptions::default(), &Silent).unwrap_err();
    assert!(matches!(exists_error, ConvertError::Bundle(BundleError::OutputExists { .. })), "{exists_error:?}");
    let converted_error = convert(&at("made"), &at("other"), ConvertOptions::default(), &Silent).unwrap_err();
    assert!(matches!(converted_error, ConvertError::Nothing { .. }), "{converted_error:?}");
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn units_equal_the_oracle_and_round_trip(
        seed: u64, count in 2usize..6000, spread in 2u64..140, cut in 0usize..6000,
        threads in prop::sample::select(vec![1usize, 3, 32, 256, 512]),
    ) {
        let weights = weights(seed, count, spread);
        match (Unit::encode(&weights, threads), oracle::encode(&weights, threads)) {
            (Ok(unit), Ok(expected)) => {
                prop_assert_eq!(&unit, &expected);
                prop_assert_eq!(unit.decode().unwrap(), weights.clone());
                prop_assert_eq!(oracle::decode(&unit).unwrap(), weights.clone());
                // Encoding in two pieces.
                let code = Code::of(&Histogram::of(&weights)).unwrap();
                let mut encoder = Encoder::new(&code, threads);
                let (mut codes, mut rest) = (Vec::new(), Vec::new());
                let (first, second) = weights.split_at(2 * cut.min(count));
                encoder.push(first, &mut codes, &mut rest);
                encoder.push(second, &mut codes, &mut rest);
                let (positions, gaps) = encoder.finish(&mut codes);
                let luts = unit.luts.clone();
                let encoded_exponent = codes;
                let (sign_mantissa, output_positions) = (rest, positions);
                let pieces = Unit { luts, encoded_exponent, sign_mantissa, output_positions, gaps, threads };
                prop_assert_eq!(pieces, unit);
            }
            (unit, expected) => prop_assert_eq!(unit.unwrap_err(), expected.unwrap_err()),
        }
    }

    #[test]
    fn any_sections_are_weights_or_an_error(
        luts in prop::collection::vec(any::<u8>(), 512..=512),
        repeat in prop::collection::vec((any::<u8>(), 1usize..200), 1..40),
        codes in prop::collection::vec(any::<u8>(), 1..64), elements in 1usize..200,
    ) {
        let mut runs: Vec<u8> = repeat.iter().flat_map(|&(value, often)| vec![value; often]).collect();
        runs.resize(runs.len().next_multiple_of(256).max(512), 1);
        for luts in [luts, runs] {
            let threads = 8;
            let unit = Unit {
                luts, gaps: vec![0; 5],
                output_positions: [0u32.to_le_bytes(), (elements as u32).to_le_bytes()].concat(),
                encoded_exponent: codes.clone(), sign_mantissa: vec![0x81; elements], threads,
            };
            if let Ok(weights) = unit.decode() {
                prop_assert_eq!(oracle::decode(&unit), Some(weights));
            }
        }
    }
}

/// Several tasks of the encoder, which end within bytes.
#[test]
fn encoder_tasks_join_at_any_bit() {
    for (count, spread) in [(200_000, 12), (131_072, 16), (70_001, 100)] {
        let weights = weights(count as u64, count, spread);
        let unit = Unit::encode(&weights, THREADS).unwrap();
        assert_eq!(unit, oracle::encode(&weights, THREADS).unwrap());
        assert_eq!(unit.decode().unwrap(), weights);
    }
}
