//! Memory is bounded (docs/guide/compress.md): the peak resident memory of a process that does only this work.

use std::{fmt::Write, fs, path::Path, process::Command};

use unweight_format::{
    Digest,
    bundle::{
        Bundle, CompressOptions, DecompressOptions, Silent, VerifyAfter, VerifyOptions, compress, decompress,
        verify_with,
    },
};

use crate::common::{Scratch, chain};

const ROOT: &str = "UNWEIGHT_TEST_ROOT";
const WHAT: &str = "UNWEIGHT_TEST_WHAT";
const RAM: &str = "UNWEIGHT_TEST_RAM";
const MIB: u64 = 1 << 20;

/// Only runs as a child process of other tests.
#[test]
fn child() {
    let Ok(root) = std::env::var(ROOT) else { return };
    let root = Path::new(&root);
    let (model, bundle, back) = (root.join("model"), root.join("bundle"), root.join("back"));
    let ram = std::env::var(RAM).ok().map(|bytes| bytes.parse::<u64>().unwrap());
    let result = match std::env::var(WHAT).unwrap().as_str() {
        "nothing" => Ok(()),
        "compress" => {
            let options = CompressOptions::default().ram_bytes(ram).verify(VerifyAfter::None);
            compress(&model, &bundle, &options, &Silent).map(drop)
        }
        "compress and verify" => {
            let options = CompressOptions::default().ram_bytes(ram);
            compress(&model, &bundle, &options, &Silent).map(drop)
        }
        "verify" => {
            let report = verify_with(&bundle, &VerifyOptions::default().ram_bytes(ram), &Silent);
            report.map(|report| assert!(report.is_ok(), "{report:?}"))
        }
        "decompress" => {
            let options = DecompressOptions::default().ram_bytes(ram);
            decompress(&bundle, &back, &options, &Silent).map(drop)
        }
        "open" => Bundle::open(&bundle).map(drop),
        other => panic!("{other}"),
    };
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap().trim();
    println!("child says: {peak} | {}", result.map_or_else(|error| chain(&error), |()| "done".into()));
}

/// The peak memory of a process in bytes, and its result.
fn peak(root: &Path, what: &str, ram: Option<u64>) -> (u64, String) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "memory::child", "--nocapture"]).env(ROOT, root).env(WHAT, what);
    command.envs(ram.map(|bytes| (RAM, bytes.to_string())));
    let output = command.output().unwrap();
    let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    let result = text.split_once("child says: ").map(|(_, result)| result.lines().next().unwrap_or_default());
    let (peak, result) = result.and_then(|result| result.split_once(" kB | ")).unwrap_or_else(|| panic!("{text}"));
    (peak.trim().parse::<u64>().unwrap() << 10, result.to_owned())
}

/// A model with tensors of 4 MiB between two larger ones; all zeros, so that it needs no disk space.
fn holes(dir: &Path, total: u64, largest: u64) {
    fs::create_dir(dir).unwrap();
    let (mut entries, mut end) = (String::new(), 0);
    let sizes = std::iter::repeat_n(4 * MIB, ((total - 2 * largest) / (4 * MIB)) as usize);
    for (i, bytes) in [largest].into_iter().chain(sizes).chain([largest]).enumerate() {
        let (shape, offsets) = ([bytes / 4096, 2048], [end, end + bytes]);
        write!(entries, r#","t{i}.weight":{{"dtype":"BF16","shape":{shape:?},"data_offsets":{offsets:?}}}"#).unwrap();
        end += bytes;
    }
    let header = format!("{{{}}}", &entries[1..]);
    let path = dir.join("model.safetensors");
    fs::write(&path, [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat()).unwrap();
    fs::File::options().write(true).open(path).unwrap().set_len(8 + header.len() as u64 + end).unwrap();
}

/// At most 1 GiB plus twice the largest tensor. This model is larger.
#[test]
fn memory_is_bounded_for_every_model() {
    let scratch = Scratch::new();
    let largest = 48 * MIB;
    let limit = 1024 * MIB + 2 * largest;
    holes(&scratch.path("model"), limit + 128 * MIB, largest);
    for what in ["compress and verify", "verify", "decompress"] {
        let (peak, result) = peak(scratch.dir(), what, None);
        assert_eq!(result, "done", "{what}");
        assert!(peak <= limit, "{what}: {} MiB", peak / MIB);
    }
}

/// `--ram` and `--threads` set limits.
#[test]
fn memory_stays_within_the_ram_option() {
    let scratch = Scratch::new();
    let (largest, ram) = (4 * MIB, 32 * MIB);
    holes(&scratch.path("model"), 160 * MIB, largest);
    // In addition, the program itself, stacks and tables.
    let limit = ram + 2 * largest + 32 * MIB;
    let steps = [("compress", "bundle"), ("compress and verify", "bundle"), ("verify", ""), ("decompress", "back")];
    for (at, (what, made)) in steps.into_iter().enumerate() {
        let (default_peak, result) = peak(scratch.dir(), what, None);
        assert_eq!(result, "done", "{what}");
        if !made.is_empty() {
            fs::remove_dir_all(scratch.path(made)).unwrap();
        }
        let (limited_peak, result) = peak(scratch.dir(), what, Some(ram));
        assert_eq!(result, "done", "{what}");
        // Without a limit, decompressing tensors in pieces takes less than this one.
        let least = if what == "decompress" { limited_peak } else { limit };
        assert!(
            limited_peak <= limit && least < default_peak,
            "{what}: {} MiB, else {}",
            limited_peak / MIB,
            default_peak / MIB
        );
        if at == 0 {
            fs::remove_dir_all(scratch.path(made)).unwrap();
        }
    }
}

/// A manifest (whose size `docs/format.md` B.4 bounds) needs memory of a small multiple of its size, whatever it
/// contains, even if it is refused.
#[test]
fn manifest_memory_is_bounded() {
    let scratch = Scratch::new();
    let bundle = scratch.path("bundle");
    fs::create_dir(&bundle).unwrap();
    let (base, _) = peak(scratch.dir(), "nothing", None);
    let zeros = "0".repeat(32);
    let tensor = |shape: &str, more: &str| {
        format!(
            r#"{{"name":"NAME","dtype":"U8","shape":[{shape}],"role":"other","layer":null,"encoding":"raw"{more},"digest":"{zeros}"}}"#
        )
    };
    let ones = vec!["1"; 64].join(",");
    let sections = format!(
        r#","sections":[{}]"#,
        vec![format!(r#"{{"name":"palette","bytes":1,"digest":"{zeros}"}}"#); 64].join(",")
    );
    let copied = format!(r#"{{"kind":"copied","name":"NAME","size":0,"digest":"{zeros}"}}"#);
    let unknown = r#"{"index":1,"mode":"hard","next_hard":null}"#;
    let cases = [
        ("tensors", "tensors", tensor("", "")),
        ("shapes", "tensors", tensor(&ones, "")),
        ("sections", "tensors", tensor("", &sections)),
        ("files", "files", copied),
        ("unknown fields", "unknown", unknown.to_owned()),
    ];
    for (what, list, entry) in cases {
        let bytes = 8 * MIB;
        let mut entries = String::new();
        for i in 0.. {
            if entries.len() as u64 > bytes {
                break;
            }
            entries.push_str(if i > 0 { "," } else { "" });
            entries.push_str(&entry.replace("NAME", &i.to_string()));
        }
        let weights = |tensors: &str| {
            format!(
                r#"{{"kind":"weights","name":"w.safetensors","size":0,"digest":"{zeros}","header_bytes":0,"header_digest":"{zeros}","shard_size":0,"shard_header_bytes":0,"shard_header_digest":"{zeros}","tensors":[{tensors}]}}"#
            )
        };
        let (files, unknown) = match list {
            "tensors" => (weights(&entries), String::new()),
            "files" => (entries, String::new()),
            _ => (weights(""), entries),
        };
        let text = format!(
            r#"{{"format":"unweight-bundle","version":{{"major":1,"minor":0}},"creator":"x","options":{{"profile":"palette","scope":"all","code_limit":8}},"files":[{files}],"unknown":[{unknown}],"manifest_digest":"{zeros}"}}"#
        );
        let digest = Digest::of(text.as_bytes()).to_string();
        let end = text.len() - 2 - zeros.len();
        let text = format!("{}{digest}\"}}", &text[..end]);
        fs::write(bundle.join("unweight.json"), &text).unwrap();
        let (all, result) = peak(scratch.dir(), "open", None);
        // It is parsed to its end: the error is about its fields.
        assert!(!result.contains("damaged") && !result.contains("at line"), "{what}: {result}");
        let times = (all - base) as f64 / text.len() as f64;
        assert!(times < 6.0, "{what}: {times:.1} times its bytes");
    }
}
