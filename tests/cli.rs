//! The `unweight` binary from outside: output, JSON keys, exit status, errors, signals.
#![cfg(feature = "cli")]

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use serde_json::Value;
use tempfile::TempDir;
use unweight::{
    codegen::spec::{Arch, GemmMmaSpec, Op, VariantSpec, catalog},
    engine::{Engine, EngineOptions},
    format::{
        bundle::{self, Bundle, BundleError, CompressOptions, PLAN_BYTES_MAX, Silent},
        testing::demo_model::{self, DemoOptions},
    },
    rt::{
        Error,
        choose::model::{Machine, PackedChooser},
        env::{Env, JitMode},
        jit::cache::{CacheState, KernelCache, Policy},
        jit::compiler::{CompileRequest, NvrtcCompiler},
        layer::loader::{LoadOptions, reachable},
    },
};

/// The command with nothing of the caller's environment that would change what it prints.
fn unweight(arguments: &[&str]) -> Command {
    let mut command = Command::new(assert_cmd::cargo::cargo_bin!("unweight"));
    command.args(arguments).env_remove("NO_COLOR").env_remove("UNWEIGHT_JIT");
    command
}

/// Runs in `folder` and expects `status`.
fn run(folder: &Path, arguments: &[&str], status: i32) -> Output {
    let output = unweight(arguments).current_dir(folder).output().unwrap();
    assert_eq!(
        output.status.code(),
        Some(status),
        "unweight {arguments:?}\n{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    output
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {}", stdout(output)))
}

/// Attaches a plan in place of the one that is there.
fn attach_plan(bundle: &Path, plan: &str) {
    bundle::attach_plan(bundle, |_| Ok::<_, BundleError>(plan.to_owned())).unwrap();
}

fn tiny() -> DemoOptions {
    DemoOptions {
        layers: 3,
        hidden: 128,
        intermediate: 320,
        heads: 4,
        kv_heads: 2,
        vocab: 512,
        ..DemoOptions::default()
    }
}

/// A model and its bundle, made once and never changed: `model`, `bundle`.
fn fixture() -> &'static Path {
    static HOME: OnceLock<TempDir> = OnceLock::new();
    HOME.get_or_init(|| {
        let home = tempfile::tempdir().unwrap();
        demo_model::write(&home.path().join("model"), &tiny()).unwrap();
        let options = CompressOptions::default();
        bundle::compress(&home.path().join("model"), &home.path().join("bundle"), &options, &Silent).unwrap();
        home
    })
    .path()
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

/// A copy of the fixture's bundle with one bit flipped near the end of its first shard; the shard's name.
fn damaged(home: &Path) -> String {
    copy(&fixture().join("bundle"), &home.join("bundle"));
    let shard = shards(&home.join("bundle"))[0].clone();
    let mut bytes = fs::read(&shard).unwrap();
    let at = bytes.len() - 100;
    bytes[at] ^= 4;
    fs::write(&shard, bytes).unwrap();
    shard.file_name().unwrap().to_str().unwrap().to_owned()
}

fn shards(folder: &Path) -> Vec<PathBuf> {
    let files = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut shards: Vec<_> = files.filter(|file| file.extension().is_some_and(|e| e == "safetensors")).collect();
    shards.sort();
    shards
}

fn same(a: &Path, b: &Path) {
    let names =
        |folder: &Path| -> BTreeSet<_> { fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name()).collect() };
    assert_eq!(names(a), names(b));
    for name in names(a) {
        assert!(fs::read(a.join(&name)).unwrap() == fs::read(b.join(&name)).unwrap(), "{name:?} differs");
    }
}

// ---- commands ----

#[test]
fn there_and_back() {
    let home = tempfile::tempdir().unwrap();
    copy(&fixture().join("model"), &home.path().join("model"));
    let output = run(home.path(), &["compress", "model", "-o", "bundle", "--verify", "full", "--sha256"], 0);
    assert!(stdout(&output).contains("huffman"), "{}", stdout(&output));
    assert_eq!(stderr(&output), "", "no terminal, no progress");
    run(home.path(), &["verify", "bundle", "--against", "model"], 0);
    let output = run(home.path(), &["decompress", "bundle", "-o", "restored"], 0);
    assert!(stdout(&output).contains("sha256:"));
    same(&home.path().join("model"), &home.path().join("restored"));
}

/// No command changes a byte, a mode or a time of the model, or puts anything beside it.
#[test]
fn the_source_is_never_touched() {
    use std::os::unix::fs::MetadataExt;
    let home = tempfile::tempdir().unwrap();
    copy(&fixture().join("model"), &home.path().join("model"));
    fn state(folder: &Path, found: &mut Vec<(PathBuf, u64, u32, i64, i64, u64)>) {
        let metadata = fs::metadata(folder).unwrap();
        let stamp = (metadata.mode(), metadata.mtime(), metadata.mtime_nsec(), metadata.ino());
        found.push((folder.to_owned(), metadata.len(), stamp.0, stamp.1, stamp.2, stamp.3));
        if metadata.is_dir() {
            let mut names: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
            names.sort();
            names.iter().for_each(|name| state(name, found));
        }
    }
    let look = || {
        let mut found = Vec::new();
        state(&home.path().join("model"), &mut found);
        found
    };
    let before = look();
    for (arguments, status) in [
        (&["plan", "model", "--compare"][..], 0),
        (&["compress", "model", "-o", "bundle", "--sha256"], 0),
        (&["compress", "model", "-o", "bundle", "--force"], 0),
        (&["compress", "model", "-o", "model", "--force"], 2),
        (&["compress", "model", "-o", "model/inside"], 2),
        (&["verify", "bundle", "--against", "model"], 0),
        (&["inspect", "bundle"], 0),
        (&["decompress", "bundle", "-o", "model"], 2),
        (&["decompress", "bundle", "-o", "back"], 0),
    ] {
        run(home.path(), arguments, status);
        assert_eq!(look(), before, "{arguments:?}");
    }
    same(&home.path().join("model"), &fixture().join("model"));
}

/// A command whose stdin never says anything ends all the same: it has no question.
#[test]
fn nothing_is_asked() {
    let home = tempfile::tempdir().unwrap();
    copy(&fixture().join("model"), &home.path().join("model"));
    for arguments in [
        &["compress", "model", "-o", "bundle"][..],
        &["compress", "model", "-o", "bundle"],
        &["compress", "model", "-o", "bundle", "--force"],
        &["verify", "bundle"],
        &["decompress", "bundle", "-o", "model"],
        &["cache", "clear"],
        &["demo", "--size", "1M"],
    ] {
        // A pipe that stays open and empty.
        let mut child = Command::new(assert_cmd::cargo::cargo_bin!("unweight"))
            .args(arguments)
            .current_dir(&home)
            .env("UNWEIGHT_CACHE_DIR", home.path().join("cache"))
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let open = child.stdin.take();
        let start = Instant::now();
        while child.try_wait().unwrap().is_none() {
            assert!(start.elapsed().as_secs() < 60, "{arguments:?} waits");
            std::thread::sleep(Duration::from_millis(20));
        }
        drop(open);
    }
}

#[test]
fn options_reach_the_library() {
    let home = tempfile::tempdir().unwrap();
    copy(&fixture().join("model"), &home.path().join("model"));
    let encodings = |arguments: &[&str]| {
        let mut all = vec!["plan", "model", "--json"];
        all.extend(arguments);
        let report = json(&run(home.path(), &all, 0));
        let mut found = BTreeMap::new();
        for tensor in report["tensors"].as_array().unwrap() {
            *found.entry(tensor["encoding"].as_str().unwrap().to_owned()).or_insert(0) += 1;
        }
        found
    };
    let all = encodings(&[]);
    assert!(all["huffman"] > 0 && !all.contains_key("palette"));
    assert!(encodings(&["--scope", "mlp"])["huffman"] < all["huffman"]);
    assert_eq!(encodings(&["--exclude", "*"]).keys().collect::<Vec<_>>(), ["raw"]);
    assert!(encodings(&["--include", "*gate_proj*"])["huffman"] < all["huffman"]);
    assert_eq!(encodings(&["--profile", "palette"])["palette"], all["huffman"]);
    let resident = encodings(&["--profile", "resident"]);
    assert!(resident["packed"] > 0 && !resident.contains_key("huffman") && !resident.contains_key("palette"));
    let inference = encodings(&["--profile", "inference"]);
    assert!(inference["huffman"] > 0 && inference["palette"] > 0);
    fs::write(home.path().join("rules.json"), r#"{"rules": [{"match": "*", "encoding": "raw"}]}"#).unwrap();
    assert_eq!(encodings(&["--plan", "rules.json"]).keys().collect::<Vec<_>>(), ["raw"]);
}

/// Why a tensor is not packed stands in every table, and the bundle goes there and back.
#[test]
fn a_resident_bundle_says_what_is_not_packed() {
    let home = tempfile::tempdir().unwrap();
    demo_model::write(&home.path().join("model"), &DemoOptions { intermediate: 330, ..tiny() }).unwrap();
    let arguments = ["compress", "model", "-o", "bundle", "--profile", "resident", "--verify", "full"];
    assert!(stdout(&run(home.path(), &arguments, 0)).contains("packed"));
    for arguments in [&["plan", "model", "--profile", "resident"][..], &["inspect", "bundle"]] {
        let table = stdout(&run(home.path(), arguments, 0));
        let line = |name: &str| table.lines().find(|line| line.contains(name)).unwrap().to_owned();
        let gate = line("model.layers.1.mlp.gate_proj.weight");
        assert!(
            gate.contains("palette") && gate.contains("not packed: rows or columns are not a multiple of 64"),
            "{gate}"
        );
        let q = line("model.layers.1.self_attn.q_proj.weight");
        assert!(q.contains("packed") && !q.contains("not packed"), "{q}");
    }
    let csv = stdout(&run(home.path(), &["inspect", "bundle", "--tensor", "*.1.mlp.gate*", "--csv"], 0));
    assert!(csv.contains(",palette,not packed: rows or columns are not a multiple of 64,"), "{csv}");
    run(home.path(), &["inspect", "bundle", "--plot", "ratio", "--svg", "plot.svg"], 0);
    assert!(fs::read_to_string(home.path().join("plot.svg")).unwrap().contains("packed"));
    run(home.path(), &["verify", "bundle", "--against", "model"], 0);
    run(home.path(), &["decompress", "bundle", "-o", "restored"], 0);
    same(&home.path().join("model"), &home.path().join("restored"));
}

#[test]
fn threads_and_memory_do_not_change_the_bytes() {
    let home = tempfile::tempdir().unwrap();
    copy(&fixture().join("model"), &home.path().join("model"));
    run(home.path(), &["compress", "model", "-o", "one", "--threads", "1", "--ram", "1M"], 0);
    run(home.path(), &["compress", "model", "-o", "four", "--threads", "4"], 0);
    same(&home.path().join("one"), &home.path().join("four"));
}

#[test]
fn verify_says_where_the_damage_is() {
    let home = tempfile::tempdir().unwrap();
    let shard = damaged(home.path());
    let output = run(home.path(), &["verify", "bundle"], 1);
    assert!(stdout(&output).contains(&shard) && stdout(&output).contains("expected"), "{}", stdout(&output));
    assert!(stderr(&output).starts_with("error: bundle: 1 problem\n  help: "), "{}", stderr(&output));
    // With --json there is one object, and it is the report.
    let report = json(&run(home.path(), &["verify", "bundle", "--json"], 1));
    assert_eq!(report["problems"][0]["file"], shard);
    // A damaged bundle is not decompressed, and leaves nothing under the name.
    run(home.path(), &["decompress", "bundle", "-o", "restored"], 1);
    assert!(!home.path().join("restored").exists());
    // Against another source.
    let other = tempfile::tempdir().unwrap();
    demo_model::write(&other.path().join("model"), &DemoOptions { seed: 9, ..tiny() }).unwrap();
    let bundle = fixture().join("bundle");
    run(other.path(), &["verify", bundle.to_str().unwrap(), "--against", "model"], 1);
}

#[test]
fn inspect_lists_and_draws() {
    let home = tempfile::tempdir().unwrap();
    let bundle = fixture().join("bundle");
    let bundle = bundle.to_str().unwrap();
    let table = stdout(&run(home.path(), &["inspect", bundle], 0));
    assert!(table.contains("model.layers.1.mlp.gate_proj.weight") && table.contains("[320, 128]"), "{table}");
    let one = stdout(&run(home.path(), &["inspect", bundle, "--tensor", "*.1.mlp.gate*", "--csv"], 0));
    let lines: Vec<_> = one.lines().collect();
    assert_eq!(lines.len(), 2, "{one}");
    assert_eq!(lines[0].split(',').count(), lines[1].split(',').count());
    assert!(lines[1].contains(",model.layers.1.mlp.gate_proj.weight,gate,1,BF16,320x128,huffman,"), "{one}");
    for (plot, words) in [("exponents", "bits of information"), ("ratio", "stored, % of the original")] {
        let output = run(home.path(), &["inspect", bundle, "--plot", plot, "--svg", "plot.svg"], 0);
        assert_eq!(stdout(&output), "");
        let svg = fs::read_to_string(home.path().join("plot.svg")).unwrap();
        assert!(svg.starts_with("<svg") && svg.contains("<text") && svg.contains(words), "{plot}");
    }
    let output = run(home.path(), &["inspect", bundle, "--tensor", "nothing*"], 2);
    assert!(stderr(&output).contains("no tensor matches nothing*"));
    // Without a file, on the terminal.
    let bars = stdout(&run(home.path(), &["inspect", bundle, "--plot", "ratio"], 0));
    assert!(bars.contains("embedding") && bars.contains('\u{2588}') && bars.contains("tensors: "), "{bars}");
    let bars = stdout(&run(home.path(), &["inspect", bundle, "--plot", "exponents"], 0));
    // Exponents of weights, and nothing far from them.
    assert!(bars.contains("bits of information") && bars.contains("\n120 ") && !bars.contains("\n  3 "), "{bars}");
    assert!(bars.lines().count() < 40, "{bars}");
    run(home.path(), &["inspect", bundle, "--svg", "x.svg"], 2);
}

#[test]
fn exponents_are_counted_whatever_the_encoding() {
    let home = tempfile::tempdir().unwrap();
    copy(&fixture().join("model"), &home.path().join("model"));
    let counts = |profile: &str| {
        run(home.path(), &["compress", "model", "-o", profile, "--profile", profile], 0);
        let arguments = ["inspect", profile, "--plot", "exponents", "--svg", "plot.svg", "--json"];
        json(&run(home.path(), &arguments, 0))["exponent_counts"].clone()
    };
    let expected = counts("distribution");
    let total: u64 = expected.as_array().unwrap().iter().map(|count| count.as_u64().unwrap()).sum();
    assert!(total > 400_000, "{total}");
    assert_eq!(counts("palette"), expected);
    assert_eq!(counts("inference"), expected);
    assert_eq!(counts("resident"), expected);
    assert_eq!(counts("compact"), expected);
}

#[test]
fn demo_goes_all_the_way() {
    let home = tempfile::tempdir().unwrap();
    let output = run(home.path(), &["demo", "--size", "2M", "--dir", "kept"], 0);
    assert!(stdout(&output).contains("identical, byte for byte"), "{}", stdout(&output));
    same(&home.path().join("kept/model"), &home.path().join("kept/restored"));
    let output = run(home.path(), &["demo", "--size", "2M", "--dir", "kept"], 2);
    assert!(stderr(&output).contains("not empty"));
}

/// Asks as bash does when the tab key is pressed at the end of the line.
fn completions(folder: &Path, words: &[&str]) -> Vec<String> {
    let binary = Path::new(assert_cmd::cargo::cargo_bin!("unweight"));
    let path = std::env::join_paths(
        [binary.parent().unwrap().to_owned()]
            .into_iter()
            .chain(std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default())),
    );
    let script = r#"source <(unweight completions bash) && COMP_WORDS=("$@") && COMP_CWORD=$(($# - 1)) &&
        _clap_complete_unweight unweight "${!#}" && printf '%s\n' "${COMPREPLY[@]}""#;
    let output = Command::new("bash")
        .args(["-c", script, "bash"])
        .args(words)
        .env("PATH", path.unwrap())
        .current_dir(folder)
        .output()
        .unwrap();
    assert!(output.status.success(), "{words:?}: {}", stderr(&output));
    // A shell takes the blanks at the ends off.
    stdout(&output).lines().map(|line| line.trim().to_owned()).collect()
}

#[test]
fn a_shell_completes_commands_kernels_and_tensors() {
    let home = fixture();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        assert!(stdout(&run(home, &["completions", shell], 0)).contains("_UNWEIGHT_COMPLETE"), "{shell}");
    }
    assert_eq!(completions(home, &["unweight", "decom"]), ["decompress"]);
    assert_eq!(completions(home, &["unweight", "compress", "--profile", "res"]), ["resident"]);
    let kernels = completions(home, &["unweight", "kernels", "emit", "uw_sm90a_encode_st"]);
    assert_eq!(kernels, ["uw_sm90a_encode_stats"]);
    // The word says the architecture, or the line does.
    let of_word = completions(home, &["unweight", "kernels", "emit", "uw_sm89_encode_st"]);
    assert_eq!(of_word, ["uw_sm89_encode_stats"]);
    let of_line = completions(home, &["unweight", "kernels", "compile", "--arch", "sm_120a", "uw_"]);
    assert!(!of_line.is_empty() && of_line.iter().all(|name| name.starts_with("uw_sm120a_")), "{of_line:?}");
    let gates = completions(home, &["unweight", "extract", "bundle", "--tensor", "model.layers.1.mlp.g"]);
    assert_eq!(gates, ["model.layers.1.mlp.gate_proj.weight"]);
    assert_eq!(completions(home, &["unweight", "inspect", "bundle", "--tensor", "model.no"]), ["model.norm.weight"]);
    let files = completions(home, &["unweight", "extract", "bundle", "--file", "model.safe"]);
    assert_eq!(files, ["model.safetensors.index.json"]);
    // What a shell would run, or a terminal obey, is not offered: names are anybody's.
    let other = tempfile::tempdir().unwrap();
    fs::create_dir(other.path().join("model")).unwrap();
    for (file, name) in
        [("a", "z.$(touch${IFS}pwned)"), ("b", "z.\x1b]0;x\x07"), ("c", "z.`id`"), ("d", "z.;id"), ("e", "z.harmless")]
    {
        one_matrix(&other.path().join(format!("model/{file}.safetensors")), name);
    }
    run(other.path(), &["compress", "model", "-o", "bundle"], 0);
    assert_eq!(completions(other.path(), &["unweight", "extract", "bundle", "--tensor", "z."]), ["z.harmless"]);
    // Without a bundle on the line there is nothing to name, and no error.
    assert_eq!(completions(home, &["unweight", "extract", "--tensor", "model."]).concat(), "");
}

#[test]
fn every_command_has_a_manual_page() {
    let home = tempfile::tempdir().unwrap();
    let report = json(&run(home.path(), &["man", "deep/man1", "--json"], 0));
    documented("man", &report);
    let pages: Vec<&str> = report["pages"].as_array().unwrap().iter().map(|page| page.as_str().unwrap()).collect();
    for page in ["unweight.1", "unweight-compress.1", "unweight-kernels-compile.1", "unweight-cache-prune.1"] {
        assert!(pages.contains(&page), "{page} in {pages:?}");
    }
    for page in &pages {
        let text = fs::read_to_string(home.path().join("deep/man1").join(page)).unwrap();
        assert!(text.contains(".TH ") && text.contains(".SH SYNOPSIS"), "{page}");
    }
    let text = fs::read_to_string(home.path().join("deep/man1/unweight-compress.1")).unwrap();
    assert!(text.contains("\\-\\-code\\-limit") && text.contains("Replace an existing output"), "{text}");
    // Again, over what is there.
    run(home.path(), &["man", "deep/man1"], 0);
    fs::write(home.path().join("file"), "").unwrap();
    run(home.path(), &["man", "file"], 2);
}

/// The example of the document does what the document says.
#[test]
fn the_documented_plan_file_is_followed() {
    let home = tempfile::tempdir().unwrap();
    copy(&fixture().join("model"), &home.path().join("model"));
    let (_, section) = include_str!("../docs/cli.md").split_once("\n## Plan files\n").unwrap();
    let (_, example) = section.split_once("```json\n").unwrap();
    let (example, _) = example.split_once("```").unwrap();
    fs::write(home.path().join("rules.json"), example).unwrap();
    let report = json(&run(home.path(), &["plan", "model", "--plan", "rules.json", "--exclude", "*", "--json"], 0));
    let encoding = |name: &str| {
        let tensors = report["tensors"].as_array().unwrap();
        tensors.iter().find(|tensor| tensor["name"] == name).unwrap()["encoding"].as_str().unwrap().to_owned()
    };
    assert_eq!(encoding("model.layers.0.mlp.up_proj.weight"), "raw");
    assert_eq!(encoding("model.layers.1.mlp.up_proj.weight"), "huffman");
    assert_eq!(encoding("model.layers.1.self_attn.q_proj.weight"), "palette");
    assert_eq!(encoding("model.norm.weight"), "raw");
    // And what it says are errors are errors.
    let more = example.replacen("\"match\"", "\"note\": 1, \"match\"", 1);
    let other = example.replacen("model.layers.0.*", "model.layers.99.*", 1);
    for (text, why) in [(more, "note"), (other, "no tensor matches 'model.layers.99.*'")] {
        fs::write(home.path().join("rules.json"), text).unwrap();
        let output = run(home.path(), &["plan", "model", "--plan", "rules.json"], 2);
        assert!(stderr(&output).contains(why), "{}", stderr(&output));
    }
}

#[test]
fn kernels_are_listed_and_emitted() {
    let home = tempfile::tempdir().unwrap();
    let report = json(&run(home.path(), &["kernels", "list", "--json"], 0));
    let kernels = report["kernels"].as_array().unwrap();
    assert!(kernels.len() > 30);
    let name = kernels[0]["name"].as_str().unwrap();
    let source = stdout(&run(home.path(), &["kernels", "emit", name], 0));
    assert!(source.contains(name) && source.contains("__global__"), "{source}");
    run(home.path(), &["kernels", "emit", "uw_sm90a_encode_*", "-o", "out"], 0);
    assert!(home.path().join("out/uw_sm90a_encode_stats.cu").is_file());
    assert!(home.path().join("out/uw_sm90a_encode_stats.plan.txt").is_file());
    assert!(home.path().join("out/include/unweight").is_dir());
    let output = run(home.path(), &["kernels", "emit"], 2);
    assert!(stderr(&output).contains("stdout takes one"));
    run(home.path(), &["kernels", "list", "uw_sm90a_nothing"], 2);
    run(home.path(), &["kernels", "list", "nothing*"], 2);
    // A pattern of another architecture than the one that is meant.
    let output = run(home.path(), &["kernels", "list", "uw_sm89_*", "--arch", "sm_86"], 2);
    assert!(stderr(&output).contains("kernels for sm_86: add `--arch sm_89`"), "{}", stderr(&output));
    assert!(
        stdout(&run(home.path(), &["kernels", "list", "uw_sm89_decode_*", "--arch", "sm_89"], 0)).contains("_full_l7")
    );
    // Without a word it is that of the GPU; where there is none, it is said.
    let output = run(home.path(), &["kernels", "list"], 0);
    match unweight_rt::device::Device::arch_of(0) {
        Ok(arch) => assert!(stdout(&output).contains(&format!("uw_{}_encode_stats", arch.tag()))),
        Err(_) => assert!(stderr(&output).contains("no GPU here: kernels for sm_90a; --arch"), "{}", stderr(&output)),
    }
    // What ships for another architecture, and what it does not have.
    let ada = json(&run(home.path(), &["kernels", "list", "--arch", "sm_89", "--json"], 0));
    let names: Vec<_> = ada["kernels"].as_array().unwrap().iter().map(|k| k["name"].as_str().unwrap()).collect();
    assert!(names.len() > 30 && names.iter().all(|name| name.starts_with("uw_sm89_")), "{names:?}");
    assert!(names.contains(&"uw_sm89_gemm_mma_b8_r2w8p3c1_async_esc_store"), "{names:?}");
    let output = run(home.path(), &["kernels", "emit", "uw_sm89_gemm_wgmma_b128_g2p6_esc_store"], 2);
    assert!(stderr(&output).contains("sm_89 has no wgmma"), "{}", stderr(&output));
    run(home.path(), &["kernels", "list", "--arch", "sm_75"], 2);
}

#[test]
fn kernels_are_compiled_once_and_looked_after() {
    assert!(
        std::env::var_os("UNWEIGHT_NVRTC").is_some(),
        "this test needs NVRTC: run `cargo xtask test`, which fetches it, or set UNWEIGHT_NVRTC"
    );
    let home = tempfile::tempdir().unwrap();
    let cache = home.path().join("cache");
    let cached = |arguments: &[&str], status: i32| {
        let output = unweight(arguments).env("UNWEIGHT_CACHE_DIR", &cache).output().unwrap();
        assert_eq!(output.status.code(), Some(status), "{arguments:?} {}", stderr(&output));
        output
    };
    assert_eq!(json(&cached(&["cache", "dir", "--json"], 0))["exists"], false);
    cached(&["cache", "ls"], 0);
    assert!(!cache.exists(), "looking must not create");
    let compile = ["kernels", "compile", "uw_sm90a_encode_stats", "uw_sm90a_encode_table", "--json"];
    let states = |output: &Output| {
        let kernels = json(output)["kernels"].as_array().unwrap().clone();
        kernels.into_iter().map(|kernel| kernel["state"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let first = cached(&compile, 0);
    assert_eq!(states(&first), ["compiled", "compiled"]);
    assert!(stderr(&first).contains("2/2"), "a line per kernel");
    documented("kernels compile", &json(&first));
    let second = cached(&compile, 0);
    assert_eq!(states(&second), ["hit", "hit"]);
    let listed = json(&cached(&["cache", "ls", "--json"], 0));
    documented("cache ls", &listed);
    assert_eq!(listed["entries"].as_array().unwrap().len(), 2);
    let folder = listed["entries"][0]["folder"].as_str().unwrap();
    let cubin = cache.join("entries").join(folder).join("kernel.cubin");
    let mut bytes = fs::read(&cubin).unwrap();
    bytes[1000] ^= 1;
    fs::write(&cubin, bytes).unwrap();
    let verified = json(&cached(&["cache", "verify", "--json"], 1));
    documented("cache verify", &verified);
    assert_eq!((&verified["good"], &verified["damaged"][0]["folder"]), (&1.into(), &folder.into()));
    cached(&["cache", "verify", "--evict"], 0);
    let pruned = json(&cached(&["cache", "prune", "--max", "1", "--json"], 0));
    documented("cache prune", &pruned);
    assert_eq!(pruned["entries"], 1);
    documented("cache clear", &json(&cached(&["cache", "clear", "--json"], 0)));
    let checked = json(&cached(&["kernels", "check", "uw_sm90a_encode_stats", "--json"], 0));
    documented("kernels check", &checked);
    assert_eq!(checked["kernels"][0]["problems"].as_array().unwrap().len(), 0);
}

// ---- JSON ----

/// A plan that `fit` makes is taken by `compress`, and gives what was said.
#[test]
fn a_plan_that_fits_is_compressed_as_it_says() {
    let home = tempfile::tempdir().unwrap();
    copy(&fixture().join("model"), &home.path().join("model"));
    let ask = ["fit", "model", "--batch", "2", "--context", "128", "--json"];
    let report = json(&run(home.path(), &[&ask[..], &["--memory", "1G", "--plan", "plan.json"]].concat(), 0));
    documented("fit", &report);
    let bytes = |key: &str| report[key].as_u64().unwrap();
    let parts: u64 = ["weight_bytes", "cache_bytes", "working_bytes", "slot_bytes"].map(bytes).iter().sum();
    assert_eq!((bytes("total_bytes"), report["slowdown"].as_f64()), (parts, Some(1.0)));
    let made = json(&run(home.path(), &["compress", "model", "-o", "bundle", "--plan", "plan.json", "--json"], 0));
    let tensors = made["tensors"].as_array().unwrap();
    let stored: u64 = tensors.iter().map(|tensor| tensor["stored_bytes"].as_u64().unwrap()).sum();
    assert!(stored.abs_diff(bytes("weight_bytes")) * 100 < stored, "{stored} for {}", bytes("weight_bytes"));
    // Each tensor in the form that its unit has; the rest raw.
    let plan: Value = serde_json::from_slice(&fs::read(home.path().join("plan.json")).unwrap()).unwrap();
    let mut forms: BTreeMap<&str, &str> = BTreeMap::new();
    for rule in plan["rules"].as_array().unwrap() {
        forms.insert(rule["match"].as_str().unwrap(), rule["encoding"].as_str().unwrap());
    }
    assert!(forms.values().any(|form| *form == "packed"));
    for tensor in tensors {
        let expected = forms.get(tensor["name"].as_str().unwrap()).unwrap_or(&forms["*"]);
        assert_eq!(tensor["encoding"].as_str().unwrap(), *expected, "{tensor}");
    }
    // The least that would do is said, and does.
    let few = run(home.path(), &["fit", "model", "--batch", "2", "--context", "5", "--memory", "1M"], 2);
    let said = stderr(&few);
    let (least, _) = said.split_once(" bytes are the least that would do").unwrap_or_else(|| panic!("{said}"));
    let least = least.rsplit(|c: char| !c.is_ascii_digit()).next().unwrap();
    run(home.path(), &["fit", "model", "--batch", "2", "--context", "5", "--memory", least], 0);
    let less = (least.parse::<u64>().unwrap() - 1).to_string();
    run(home.path(), &["fit", "model", "--batch", "2", "--context", "5", "--memory", &less], 2);
    // Where the plan cannot be written nothing is asked of the weights.
    let nowhere = run(home.path(), &["fit", "absent", "--memory", "1G", "--plan", "nowhere/plan.json"], 2);
    assert!(stderr(&nowhere).contains("nowhere"), "{}", stderr(&nowhere));
    // A plan file is replaced, nothing else.
    let text = stdout(&run(home.path(), &["fit", "model", "--memory", "1G", "--context", "128", "--arch", "sm_89"], 0));
    let line = text.lines().find(|line| line.starts_with("products of a step at batch 1: ")).expect(&text);
    let words: Vec<&str> = line.split(' ').collect();
    assert!(words[7].parse::<f64>().is_ok() && words[8] == "us,", "{line}");
    assert!(line.contains(" times the fastest plan's; forms that sm_89 runs, "), "{line}");
    run(home.path(), &["fit", "model", "--memory", "1G", "--context", "128", "--plan", "plan.json"], 0);
    let output = run(home.path(), &["fit", "model", "--memory", "1G", "--plan", "model/config.json"], 2);
    assert!(stderr(&output).contains("is no plan file"), "{}", stderr(&output));
    // Options of nothing are named as they were given.
    for option in ["--batch", "--context", "--memory", "--threads"] {
        let text = stderr(&run(home.path(), &["fit", "model", "--max-slowdown", "5%", option, "0"], 2));
        assert!(text.contains(&format!("'{option} <")) && text.contains("'0'"), "{text}");
    }
    let output = run(home.path(), &["fit", "model"], 2);
    assert!(stderr(&output).contains("--memory"), "{}", stderr(&output));
    // What no kernel reads as it is would be packed when it is loaded: no plan has it.
    run(home.path(), &["demo", "--dir", "demo", "--size", "16M", "--profile", "resident", "-q"], 0);
    for (arch, compact) in [("sm_90a", true), ("sm_89", false)] {
        let ask = ["fit", "demo/model", "--max-slowdown", "60%", "--batch", "8", "--context", "64", "--arch", arch];
        let report = json(&run(home.path(), &[&ask[..], &["--json"]].concat(), 0));
        let mut groups = report["groups"].as_array().unwrap().iter();
        assert_eq!((groups.any(|group| group["encoding"] == "compact"), &report["arch"]), (compact, &arch.into()));
    }
    fs::remove_file(home.path().join("model/config.json")).unwrap();
    let output = run(home.path(), &["fit", "model", "--max-slowdown", "5%"], 2);
    assert!(stderr(&output).contains("config.json"), "{}", stderr(&output));
}

/// What an engine would not load has no plan; what it would, counts once. Experts are packed.
#[test]
fn fit_refuses_what_no_engine_loads() {
    let home = tempfile::tempdir().unwrap();
    let small = DemoOptions {
        layers: 2,
        hidden: 256,
        intermediate: 256,
        heads: 4,
        kv_heads: 2,
        vocab: 512,
        ..DemoOptions::default()
    };
    let write = |name: &str, options: DemoOptions| demo_model::write(&home.path().join(name), &options).unwrap();
    write("mixture", DemoOptions { experts: 3, shards: 1, ..small });
    let ask = |model: &'static str| ["fit", model, "--memory", "1G", "--context", "128", "--json"];
    run(home.path(), &ask("mixture"), 0);
    // Its MLPs have one way to lie.
    run(home.path(), &["compress", "mixture", "-o", "experts", "--profile", "inference", "--quiet"], 0);
    for command in [&["tune", "experts"][..], &["kernels", "attach", "experts", "--arch", "sm_90a", "--mlp", "stored"]]
    {
        let refused = stderr(&run(home.path(), command, 2));
        assert!(refused.contains("of this") && refused.contains("are experts, which run from packed"), "{refused}");
    }
    // An expert by another number: that one is missing.
    let weights = home.path().join("mixture/model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    let (old, new) = (b"1.block_sparse_moe.experts.2.w1", b"1.block_sparse_moe.experts.7.w1");
    let at = bytes.windows(old.len()).position(|window| window == old).unwrap();
    bytes[at..at + new.len()].copy_from_slice(new);
    fs::write(&weights, bytes).unwrap();
    let refused = stderr(&run(home.path(), &ask("mixture"), 2));
    assert!(refused.contains("'model.layers.1.block_sparse_moe.experts.2.w1.weight'"), "{refused}");
    // The same weights once more, in a file that nobody loads.
    write("model", DemoOptions { shards: 1, ..small });
    let once = json(&run(home.path(), &ask("model"), 0));
    let weights = home.path().join("model/model.safetensors");
    fs::copy(&weights, home.path().join("model/consolidated.safetensors")).unwrap();
    let twice = json(&run(home.path(), &ask("model"), 0));
    assert_eq!((&once["weight_bytes"], &once["groups"]), (&twice["weight_bytes"], &twice["groups"]));
    // A context that nobody asked for is none that the model does not take.
    let config = home.path().join("model/config.json");
    let mut text: Value = serde_json::from_slice(&fs::read(&config).unwrap()).unwrap();
    text["max_position_embeddings"] = 512.into();
    fs::write(&config, text.to_string()).unwrap();
    let output = run(home.path(), &["fit", "model", "--memory", "1G", "--json"], 0);
    assert_eq!(json(&output)["context"], 512);
    assert!(stderr(&output).contains("a context of 512"), "{}", stderr(&output));
    let longer = run(home.path(), &["fit", "model", "--memory", "1G", "--context", "513"], 2);
    assert!(stderr(&longer).contains("limit is 512"), "{}", stderr(&longer));
}

/// What `tune` refuses before it looks for a GPU, and what it says without one.
#[test]
fn tune_says_what_it_needs() {
    let home = tempfile::tempdir().unwrap();
    copy(&fixture().join("model"), &home.path().join("model"));
    for profile in ["resident", "inference"] {
        run(home.path(), &["compress", "model", "-o", profile, "--profile", profile, "--quiet"], 0);
    }
    let output = run(home.path(), &["tune", "resident"], 2);
    let text = stderr(&output);
    assert!(text.contains("nothing to choose") && text.contains("--profile inference"), "{text}");
    for (wrong, said) in [
        (&["tune", "inference", "--batch", "3"][..], "1, 8, 16"),
        (&["tune", "inference", "--mlp", "linears"][..], "neither stored nor alternate"),
        (&["tune", "nowhere"][..], "nowhere"),
        (&["tune", "inference", "--context", "8188"][..], "give 8187 at most"),
    ] {
        let output = run(home.path(), wrong, 2);
        assert!(stderr(&output).contains(said), "{}", stderr(&output));
    }
    // A plan that is none is said and left alone, before anybody asks for a GPU.
    let dir = home.path().join("inference");
    attach_plan(&dir, "{\"version\": 1}");
    let generate = ["generate", "inference", "--tokens", "1", "--mlp", "stored", "--device", "99"];
    let output = run(home.path(), &generate, 2);
    assert!(stderr(&output).contains("not used: a tuned plan of version 1, "), "{}", stderr(&output));
    assert!(!stderr(&output).contains("trust-attached"), "a plan is no code: {}", stderr(&output));
    run(home.path(), &["verify", "inference", "--against", "model"], 0);
    // What cannot be written is said before anything is loaded, and nothing is left behind.
    let before: Vec<_> = fs::read_dir(home.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    fs::write(home.path().join("text"), "mine").unwrap();
    fs::create_dir(home.path().join("folder.1")).unwrap();
    for (wrong, said) in [
        (["--journal", "absent/journal"], "absent/journal.1"),
        (["--journal", "text/journal"], "text/journal.1"),
        (["--journal", "folder"], "no file that a journal could be"),
        (["--svg", "absent/plot.svg"], "absent"),
        (["--svg", "text"], "is no drawing"),
        (["--svg", "model"], "is no drawing"),
    ] {
        let output = run(home.path(), &[&["tune", "inference", "--save"], &wrong[..]].concat(), 2);
        let text = stderr(&output);
        assert!(text.contains(said) && !text.contains("libcuda"), "{wrong:?}: {text}");
    }
    // So are journals that are none, and those that another process writes; what was there is as it was.
    let second = home.path().join("journal.64");
    fs::write(&second, "mine\n").unwrap();
    let journals = ["tune", "inference", "--journal", "journal", "--batch", "1,64"];
    let text = stderr(&run(home.path(), &journals, 2));
    assert!(text.contains("journal.64: line 1: ") && !text.contains("libcuda"), "{text}");
    assert_eq!(fs::read_to_string(&second).unwrap(), "mine\n");
    fs::write(&second, "").unwrap();
    let held = fs::File::open(&second).unwrap();
    held.lock().unwrap();
    let text = stderr(&run(home.path(), &journals, 2));
    assert!(text.contains(" writes this journal") && !text.contains("libcuda"), "{text}");
    drop(held);
    fs::remove_file(&second).unwrap();
    // A search for what will not run is refused.
    let asked = ["bench", "decode", "--geometry", "llama-3.2-1b", "--tune", "--mlp", "linears"];
    let text = stderr(&run(home.path(), &asked, 2));
    assert!(text.contains("give --mlp stored") && !text.contains("libcuda"), "{text}");
    let attached = dir.join("unweight.kernels");
    fs::write(&attached, "damaged").unwrap();
    let output = run(home.path(), &["tune", "inference", "--save"], 1);
    assert!(stderr(&output).contains("cut off at byte 7"), "{}", stderr(&output));
    fs::remove_file(&attached).unwrap();
    // Nor is the plan of a newer program replaced, nor one that has no room for more.
    let full = format!("{{\"version\": 2, \"settings\": []}}{}", " ".repeat(PLAN_BYTES_MAX - 8192));
    for (plan, said) in [("{\"version\": 3}", "use the newer program"), (&full, "5 settings are to be added")] {
        attach_plan(&dir, plan);
        let text = stderr(&run(home.path(), &["tune", "inference", "--save"], 2));
        assert!(text.contains(said) && text.contains("kernels detach") && !text.contains("libcuda"), "{text}");
        assert_eq!(Bundle::open(&dir).unwrap().attached().unwrap().unwrap().plan(), Some(plan));
        run(home.path(), &["kernels", "detach", "inference"], 0);
    }
    fs::remove_file(home.path().join("text")).unwrap();
    fs::remove_dir(home.path().join("folder.1")).unwrap();
    let after: Vec<_> = fs::read_dir(home.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(before.len(), after.len(), "{after:?}");
    // Where there is a GPU, `tests/gpu/pipelines.rs` has the rest.
    if unweight_rt::device::Device::open(0).is_err() {
        let output = run(home.path(), &["tune", "inference"], 2);
        assert!(stderr(&output).contains("libcuda"), "{}", stderr(&output));
    }
}

/// Holds the keys of an output against the table of docs/cli.md, both ways; rows that begin with "(" are optional.
fn documented(command: &str, output: &Value) {
    // A heading may say with which option.
    assert_eq!(output["command"], command.split(" --").next().unwrap());
    assert_eq!(output["unweight_version"], env!("CARGO_PKG_VERSION"));
    let mut found = BTreeSet::new();
    keys(output, "", &mut found);
    let expected = table(command);
    for key in found.iter().filter(|key| !["command", "unweight_version"].contains(&key.as_str())) {
        // A list that happens to be empty has no keys below it.
        let list = format!("{key}[]");
        let known = |key: &str| expected.contains_key(key) || expected.keys().any(|known| known.starts_with(&list));
        // What a GPU looks like depends on the machine.
        assert!(known(key) || key.starts_with("devices[]."), "docs/cli.md, {command}: `{key}` is not documented");
    }
    for (key, optional) in expected {
        assert!(
            found.contains(&key) || optional || is_deeply_empty(output, &key),
            "docs/cli.md, {command}: `{key}` is not printed"
        );
    }
}

/// Whether some list on the way to `key` is empty.
fn is_deeply_empty(output: &Value, key: &str) -> bool {
    let mut at = output;
    for part in key.split('.') {
        let list = part.strip_suffix("[]");
        at = &at[list.unwrap_or(part)];
        if list.is_some() {
            match at.as_array().and_then(|items| items.first()) {
                Some(first) => at = first,
                None => return true,
            }
        }
    }
    false
}

/// Leaves of an object, lists of objects by all their elements.
fn keys(value: &Value, at: &str, found: &mut BTreeSet<String>) {
    match value {
        Value::Object(object) => {
            for (key, value) in object {
                keys(value, &if at.is_empty() { key.clone() } else { format!("{at}.{key}") }, found);
            }
        }
        Value::Array(items) if items.iter().any(Value::is_object) => {
            items.iter().for_each(|item| keys(item, &format!("{at}[]"), found));
        }
        _ => {
            found.insert(at.to_owned());
        }
    }
}

/// Keys of a heading's table, with whether they are optional; references to other headings are followed.
fn table(heading: &str) -> BTreeMap<String, bool> {
    let text = include_str!("../docs/cli.md");
    let (_, rest) = text.split_once(&format!("\n### {heading}\n")).unwrap_or_else(|| panic!("no heading {heading}"));
    let mut found = BTreeMap::new();
    for line in rest.lines().take_while(|line| !line.starts_with('#')).filter(|line| line.starts_with("| `")) {
        let mut cells = line.split('|').map(str::trim);
        let (key, meaning) = (cells.nth(1).unwrap().trim_matches('`'), cells.next().unwrap());
        match meaning.split_once("](#").and_then(|(_, rest)| rest.split_once(')')) {
            Some((other, _)) => {
                found.extend(table(other).into_iter().map(|(inner, optional)| (format!("{key}.{inner}"), optional)));
            }
            None => {
                found.insert(key.to_owned(), meaning.starts_with('('));
            }
        }
    }
    found
}

#[test]
fn json_is_as_documented() {
    let home = tempfile::tempdir().unwrap();
    copy(&fixture().join("model"), &home.path().join("model"));
    let cases: [(&str, &[&str]); 14] = [
        ("plan", &["model"]),
        ("plan --compare", &["model"]),
        ("compress", &["model", "-o", "bundle"]),
        ("verify", &["bundle"]),
        ("inspect", &["bundle"]),
        ("extract", &["bundle", "--tensor", "model.norm.weight", "-o", "norm.bin"]),
        ("extract --file", &["model-00001-of-00002.safetensors", "bundle", "-o", "shard.bin"]),
        ("decompress", &["bundle", "-o", "restored"]),
        ("demo", &["--size", "1M"]),
        ("doctor", &[]),
        ("kernels list", &[]),
        ("kernels emit", &["uw_sm90a_encode_stats"]),
        ("cache dir", &[]),
        ("cache clear", &[]),
    ];
    for (command, arguments) in cases {
        let mut all: Vec<_> = command.split(' ').collect();
        all.extend(arguments);
        all.push("--json");
        let output =
            unweight(&all).current_dir(&home).env("UNWEIGHT_CACHE_DIR", home.path().join("cache")).output().unwrap();
        assert!(output.status.success(), "{command}: {}", stderr(&output));
        documented(command, &json(&output));
    }
    // The lists that a sound bundle leaves empty.
    let broken = tempfile::tempdir().unwrap();
    damaged(broken.path());
    documented("verify", &json(&run(broken.path(), &["verify", "bundle", "--json"], 1)));
}

#[test]
fn failures_are_json_too() {
    let home = tempfile::tempdir().unwrap();
    let report = json(&run(home.path(), &["verify", "nowhere", "--json"], 2));
    assert_eq!(report["command"], "verify");
    let mut found = BTreeSet::new();
    keys(&report["error"], "", &mut found);
    assert_eq!(found, table("error").into_keys().collect());
    assert_eq!(report["error"]["class"], "failed");
}

// ---- conventions ----

#[test]
fn quiet_and_verbose() {
    let home = tempfile::tempdir().unwrap();
    copy(&fixture().join("model"), &home.path().join("model"));
    let output = run(home.path(), &["compress", "model", "-o", "quiet", "-q"], 0);
    assert_eq!((stdout(&output).as_str(), stderr(&output).as_str()), ("", ""));
    // What was asked for is printed in any case.
    assert!(!stdout(&run(home.path(), &["inspect", "quiet", "-q"], 0)).is_empty());
    assert!(!stdout(&run(home.path(), &["verify", "quiet", "-q", "--json"], 0)).is_empty());
    let output = run(home.path(), &["compress", "model", "-o", "loud", "-vv"], 0);
    assert!(stderr(&output).contains("model-00001-of-00002.safetensors"), "{}", stderr(&output));
    assert!(stderr(&output).contains("model.layers.1.mlp.gate_proj.weight"), "{}", stderr(&output));
    run(home.path(), &["compress", "model", "-o", "both", "-q", "-v"], 2);
}

#[test]
fn nothing_is_coloured_without_a_terminal() {
    let home = tempfile::tempdir().unwrap();
    for no_color in [None, Some("1")] {
        for arguments in [&["verify", "nowhere"][..], &["--nonsense"], &["--help"]] {
            let mut command = unweight(arguments);
            command.current_dir(&home);
            no_color.map(|value| command.env("NO_COLOR", value));
            let output = command.output().unwrap();
            let text = [output.stdout, output.stderr].concat();
            assert!(!text.is_empty() && !text.contains(&0x1b), "{arguments:?}");
        }
    }
}

#[test]
fn a_reader_that_goes_away_is_no_error() {
    let mut child = unweight(&["kernels", "list", "--arch", "sm_90a"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{:?}", output.status);
    assert_eq!(stderr(&output), "");
}

#[test]
fn a_missing_gpu_is_explained() {
    let home = tempfile::tempdir().unwrap();
    copy(&fixture().join("model"), &home.path().join("model"));
    if unweight_rt::device::Device::open(0).is_ok() {
        run(home.path(), &["compress", "model", "-o", "out", "--device", "cuda"], 0);
        return;
    }
    let output = run(home.path(), &["compress", "model", "-o", "out", "--device", "cuda"], 2);
    let text = stderr(&output);
    assert!(text.starts_with("error: ") && text.contains("libcuda"), "{text}");
    assert!(!home.path().join("out").exists() && !home.path().join("out.partial").exists());
}

#[test]
fn generate_explains_what_it_lacks() {
    let bundle = fixture().join("bundle");
    let bundle = bundle.to_str().unwrap();
    let home = tempfile::tempdir().unwrap();
    let notes = home.path().join("notes.txt");
    fs::write(&notes, "dear diary").unwrap();
    let notes = notes.to_str().unwrap();
    let shard = shards(Path::new(bundle))[0].to_str().unwrap().to_owned();
    let before = fs::read(&shard).unwrap();
    let cases: [(&[&str], &[&str]); 18] = [
        (&["--tokens", "-5"], &["'-5'"]),
        (&["--tokens", "1.5"], &["'1.5'", "1,450,4996"]),
        (&["--tokens", ""], &["no tokens", "1,450,4996"]),
        (&["--tokens", "1,512"], &["token 512 at place 1", "vocabulary ends at 512"]),
        (
            &["--tokens", "1", "-n", "64", "--context", "64"],
            &["1 tokens of the prompt and 64 to make", "context of 64"],
        ),
        (&["--tokens", "1", "-n", "4000000000"], &["exceed the context"]),
        (&["--tokens", "1", "--chunk", "100"], &["chunk = 100", "multiple of 64"]),
        (&["--tokens", "1", "--dump-logits", notes], &["no file of logits", "--dump-logits"]),
        (&["--tokens", "1", "--dump-logits", &shard], &["no file of logits"]),
        (&[], &["no prompt", "--tokens"]),
        (&["--chat", "--prompt", "<5>"], &["no chat template"]),
        (&["--tokens", "1,99999999999"], &["99999999999", "1,450,4996"]),
        (&["--tokens", "1", "--top-p", "2"], &["top_p = 2", "at most 1"]),
        (&["--tokens", "1", "--temperature", "-1"], &["temperature = -1"]),
        (&["--tokens", "1", "--by-steps"], &["--dump-logits"]),
        (&["--tokens", "1", "--resident-experts", "2"], &["resident_experts = 2", "no experts"]),
        (&["--tokens", "1", "--resident-experts", "0"], &["--resident-experts", "0"]),
        (&["--tokens", "1", "--prompt", "hello"], &["cannot be used with"]),
    ];
    for (arguments, expected) in cases {
        let output = run(Path::new("."), &[&["generate", bundle], arguments].concat(), 2);
        let text = stderr(&output);
        for part in expected {
            assert!(text.contains(part), "{arguments:?}: no {part:?} in\n{text}");
        }
    }
    assert_eq!(fs::read_to_string(notes).unwrap(), "dear diary");
    assert!(fs::read(&shard).unwrap() == before);
    if unweight_rt::device::Device::open(0).is_err() {
        let logits = home.path().join("logits.safetensors");
        let header = br#"{"logits.0":{"dtype":"BF16","shape":[0,512],"data_offsets":[0,0]}}"#;
        fs::write(&logits, [&(header.len() as u64).to_le_bytes()[..], header].concat()).unwrap();
        let (context, file) = (["--context", "2"], logits.to_str().unwrap());
        // Logits may be replaced, and make no tokens that the context would have to hold.
        for more in [&[][..], &[&context[..], &["--dump-logits", file]].concat()] {
            let output = run(Path::new("."), &[&["generate", bundle, "--tokens", "1,2"], more].concat(), 2);
            assert!(stderr(&output).contains("libcuda"), "{more:?}: {}", stderr(&output));
        }
        // A list of batches leaves the bundle what it is.
        let output = run(Path::new("."), &["bench", "decode", "--batch", "1,8", bundle], 2);
        assert!(stderr(&output).contains("libcuda"), "{}", stderr(&output));
    }
    for arguments in [
        &["bench", "decode"][..],
        &["bench", "decode", "--geometry", "llama-9"],
        &["bench", "decode", bundle, "--geometry", "llama-3.1-8b"],
    ] {
        run(Path::new("."), arguments, 2);
    }
}

#[test]
fn mistakes_are_explained() {
    let home = tempfile::tempdir().unwrap();
    copy(&fixture().join("model"), &home.path().join("model"));
    fs::create_dir(home.path().join("empty")).unwrap();
    fs::create_dir(home.path().join("exists")).unwrap();
    fs::create_dir(home.path().join("short")).unwrap();
    fs::write(home.path().join("short/model.safetensors"), [9, 0, 0, 0, 0, 0, 0, 0, b'{', b'}']).unwrap();
    fs::write(home.path().join("rules.json"), "{").unwrap();
    let cases: [(&[&str], &[&str]); 12] = [
        (&["compress", "nowhere", "-o", "out"], &["nowhere"]),
        (&["compress", "empty", "-o", "out"], &["empty", "no *.safetensors"]),
        (&["compress", "model", "-o", "exists"], &["exists", "--force"]),
        (&["compress", "model", "-o", "model/inside"], &["model", "elsewhere"]),
        (&["compress", "short", "-o", "out"], &["short/model.safetensors", "cause: "]),
        (&["compress", "model", "-o", "out", "--plan", "rules.json"], &["rules.json"]),
        (&["compress", "model", "-o", "out", "--ram", "lots"], &["lots", "4G"]),
        (&["compress", "model", "-o", "out", "--code-limit", "16"], &["16"]),
        (&["compress", "model", "-o", "out", "--profile", "zip"], &["zip", "distribution"]),
        (&["compress", "model"], &["--output"]),
        (&["verify", "model"], &["model", "not a bundle"]),
        (&["decompress", "empty", "-o", "out"], &["empty", "not a bundle"]),
    ];
    for (arguments, words) in cases {
        let output = run(home.path(), arguments, 2);
        assert_eq!(stdout(&output), "", "{arguments:?}");
        let text = stderr(&output);
        assert!(text.starts_with("error: "), "{text}");
        words.iter().for_each(|word| assert!(text.contains(word), "{arguments:?} should mention {word}: {text}"));
        assert!(!home.path().join("out").exists());
    }
}

#[test]
fn an_interrupted_run_is_resumed() {
    let home = tempfile::tempdir().unwrap();
    // Large enough to be caught in the act, in many files so that some are finished.
    let options = DemoOptions {
        layers: 12,
        hidden: 1024,
        intermediate: 2816,
        heads: 16,
        kv_heads: 4,
        vocab: 4096,
        shards: 24,
        ..tiny()
    };
    demo_model::write(&home.path().join("model"), &options).unwrap();
    run(home.path(), &["compress", "model", "-o", "expected", "--threads", "1"], 0);
    let mut interrupted = false;
    // Where a loaded machine lets a run finish before the signal comes, the next one is asked earlier.
    for finished_files in [6, 2, 1] {
        let arguments = ["compress", "model", "-o", "bundle", "--threads", "1", "--verify", "none"];
        let child =
            unweight(&arguments).current_dir(&home).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let finished = home.path().join("bundle.partial/tree");
        let start = Instant::now();
        let done = || if finished.is_dir() { shards(&finished).len() } else { 0 };
        while done() < finished_files
            && !home.path().join("bundle").exists()
            && start.elapsed() < Duration::from_secs(60)
        {
            std::thread::sleep(Duration::from_millis(1));
        }
        let pid = rustix::process::Pid::from_child(&child);
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::INT);
        let output = child.wait_with_output().unwrap();
        if output.status.success() {
            fs::remove_dir_all(home.path().join("bundle")).unwrap();
            continue;
        }
        assert_eq!(output.status.code(), Some(130), "{}", stderr(&output));
        assert!(stderr(&output).contains("--resume"), "{}", stderr(&output));
        assert!(!home.path().join("bundle").exists(), "nothing half-written under the final name");
        // Whoever looks for the bundle, or into what there is of it, is told.
        for path in ["bundle", "bundle.partial"] {
            let text = stderr(&run(home.path(), &["verify", path], 2));
            assert!(text.contains("bundle: not finished: ") && text.contains("done in bundle.partial"), "{text}");
            assert!(text.contains("the command that was making it goes on from there with --resume"), "{text}");
        }
        interrupted = true;
        break;
    }
    assert!(interrupted, "no run could be interrupted");
    let report = json(&run(home.path(), &["compress", "model", "-o", "bundle", "--resume", "--json"], 0));
    assert!(!report["resumed_files"].as_array().unwrap().is_empty());
    same(&home.path().join("expected"), &home.path().join("bundle"));
    assert!(!home.path().join("bundle.partial").exists());
}

// ---- nothing lost, nobody fooled ----

#[test]
fn wrong_usage_is_json_too() {
    let home = tempfile::tempdir().unwrap();
    for arguments in [&["verify", "--json"][..], &["--json", "verify", "b", "--nonsense"]] {
        let output = run(home.path(), arguments, 2);
        let report = json(&output);
        assert_eq!((&report["command"], &report["error"]["class"]), (&"verify".into(), &"failed".into()));
        assert!(!report["error"]["message"].as_str().unwrap().is_empty(), "{report}");
        assert!(stderr(&output).starts_with("error: "));
    }
    assert_eq!(stdout(&run(home.path(), &["verify"], 2)), "");
}

/// A safetensors file with one BF16 matrix.
fn one_matrix(path: &Path, name: &str) {
    let header = serde_json::json!({ name: { "dtype": "BF16", "shape": [64, 64], "data_offsets": [0, 8192] } });
    let header = header.to_string();
    let weights = unweight::format::testing::Weights::TRAINED.bytes(4096, 1);
    let length = (header.len() as u64).to_le_bytes();
    fs::write(path, [&length[..], header.as_bytes(), &weights].concat()).unwrap();
}

#[test]
fn names_cannot_control_the_terminal() {
    let home = tempfile::tempdir().unwrap();
    fs::create_dir(home.path().join("model")).unwrap();
    one_matrix(&home.path().join("model/a.safetensors"), "evil\x1b[2J\x07\0\u{9b}31m\u{202e}.mlp.up_proj.weight");
    // A line end in a name says something that this program did not.
    one_matrix(&home.path().join("model/b.safetensors"), "x\nall is sound\ny.mlp.up_proj.weight");
    let commands: [(&[&str], i32); 6] = [
        (&["plan", "model", "-vv"], 0),
        (&["compress", "model", "-o", "bundle", "-vv"], 0),
        (&["inspect", "bundle"], 0),
        (&["verify", "bundle", "-vv"], 0),
        (&["decompress", "bundle", "-o", "back", "-vv"], 0),
        (&["inspect", "bundle", "--tensor", "\x1b]0;x\x07"], 2),
    ];
    let check = |output: &Output, what: &str| {
        let text = stdout(output) + &stderr(output);
        let harmful = |c: char| c.is_control() && !matches!(c, '\n' | '\t') || c == '\u{202e}';
        assert!(!text.contains(harmful), "{what}: {text:?}");
        assert!(!text.lines().any(|line| line.starts_with("all is sound")), "{what}: {text:?}");
        text
    };
    for (arguments, status) in commands {
        check(&run(home.path(), arguments, status), &format!("{arguments:?}"));
    }
    assert!(check(&run(home.path(), &["inspect", "bundle"], 0), "inspect").contains("evil\\u{1b}[2J"));
    // The name in an error, too.
    for shard in ["bundle/a.safetensors", "bundle/b.safetensors"] {
        let shard = home.path().join(shard);
        let mut bytes = fs::read(&shard).unwrap();
        let at = bytes.len() - 3000;
        bytes[at] ^= 1;
        fs::write(&shard, bytes).unwrap();
    }
    check(&run(home.path(), &["verify", "bundle"], 1), "verify");
    check(&run(home.path(), &["decompress", "bundle", "-o", "again"], 1), "decompress");
}

#[test]
fn a_drawing_replaces_nothing_but_a_drawing() {
    let home = tempfile::tempdir().unwrap();
    copy(&fixture().join("model"), &home.path().join("model"));
    run(home.path(), &["compress", "model", "-o", "bundle"], 0);
    let shard = "bundle/model-00001-of-00002.safetensors";
    let before = fs::read(home.path().join(shard)).unwrap();
    let output = run(home.path(), &["inspect", "bundle", "--plot", "ratio", "--svg", shard], 2);
    assert!(stderr(&output).contains("is no drawing"), "{}", stderr(&output));
    assert!(fs::read(home.path().join(shard)).unwrap() == before);
    // A shard that speaks of drawings, and a link to a drawing.
    fs::create_dir(home.path().join("odd")).unwrap();
    one_matrix(&home.path().join("odd/m.safetensors"), "<svg");
    let before = fs::read(home.path().join("odd/m.safetensors")).unwrap();
    fs::write(home.path().join("elsewhere.svg"), "<svg/>").unwrap();
    std::os::unix::fs::symlink("elsewhere.svg", home.path().join("link.svg")).unwrap();
    for name in ["odd/m.safetensors", "link.svg", "bundle"] {
        let output = run(home.path(), &["inspect", "bundle", "--plot", "ratio", "--svg", name], 2);
        assert!(stderr(&output).contains("is no drawing"), "{name}: {}", stderr(&output));
    }
    assert!(fs::read(home.path().join("odd/m.safetensors")).unwrap() == before);
    assert_eq!(fs::read(home.path().join("elsewhere.svg")).unwrap(), b"<svg/>");
    for _ in 0..2 {
        run(home.path(), &["inspect", "bundle", "--plot", "ratio", "--svg", "x.svg"], 0);
    }
}

#[test]
fn a_file_limit_is_a_full_disk_not_the_end() {
    let home = tempfile::tempdir().unwrap();
    copy(&fixture().join("model"), &home.path().join("model"));
    // In KiB; the shards of the model have more.
    let output = Command::new("bash")
        .args(["-c", "ulimit -f 64; exec \"$0\" compress model -o bundle"])
        .arg(assert_cmd::cargo::cargo_bin!("unweight"))
        .current_dir(&home)
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2), "{:?} {}", output.status, stderr(&output));
    assert!(
        stderr(&output).contains("no room to write") && stderr(&output).contains("--resume"),
        "{}",
        stderr(&output)
    );
    run(home.path(), &["compress", "model", "-o", "bundle", "--resume"], 0);
}

/// Extents whose product overflows, and no elements.
#[test]
fn a_shape_without_elements_is_shown() {
    let home = tempfile::tempdir().unwrap();
    fs::create_dir(home.path().join("model")).unwrap();
    let header = r#"{"t":{"dtype":"BF16","shape":[1099511627776,1099511627776,0],"data_offsets":[0,0]}}"#;
    let file = [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat();
    fs::write(home.path().join("model/model.safetensors"), file).unwrap();
    run(home.path(), &["compress", "model", "-o", "bundle"], 0);
    let report = json(&run(home.path(), &["inspect", "bundle", "--json"], 0));
    assert_eq!(report["tensors"][0]["elements"], 0);
    run(home.path(), &["inspect", "bundle"], 0);
    run(home.path(), &["plan", "model", "--compare"], 0);
    // Without elements there is nothing to draw.
    run(home.path(), &["inspect", "bundle", "--plot", "ratio"], 2);
}

/// Whichever thread cannot be made: an error that says so.
#[test]
fn too_few_processes_are_an_error() {
    use std::os::unix::process::CommandExt;
    let home = tempfile::tempdir().unwrap();
    for part in ["model", "bundle"] {
        copy(&fixture().join(part), &home.path().join(part));
    }
    let mut program = PathBuf::from(assert_cmd::cargo::cargo_bin!("unweight"));
    // Root is not bound by the limit. A user of nobody else's, so that nobody else's processes count.
    let user = rustix::process::geteuid().is_root().then(|| 20_000 + std::process::id() % 40_000);
    if let Some(user) = user {
        fs::copy(&program, home.path().join("unweight")).unwrap();
        program = home.path().join("unweight");
        assert!(Command::new("chown").args(["-R", &user.to_string()]).arg(home.path()).status().unwrap().success());
    }
    let commands: [&[&str]; 5] = [
        &["demo", "--size", "1M"],
        &["plan", "model"],
        &["compress", "model", "-o", "out"],
        &["verify", "bundle"],
        &["decompress", "bundle", "-o", "back"],
    ];
    for arguments in commands {
        for most in 1..=3 {
            let mut command = Command::new("bash");
            command.args(["-c", &format!("ulimit -u {most}; exec \"$0\" \"$@\"")]).arg(&program).args(arguments);
            command.current_dir(&home).env("TMPDIR", home.path());
            if let Some(user) = user {
                command.uid(user).gid(user);
            }
            let output = command.output().unwrap();
            let said = stderr(&output);
            match output.status.code() {
                Some(0) if most > 1 => {}
                Some(2) => assert!(said.contains("cannot start") && said.contains("threads"), "{arguments:?}: {said}"),
                other => panic!("{arguments:?} with {most}: {other:?}, {said}"),
            }
            for made in ["out", "back"] {
                drop(fs::remove_dir_all(home.path().join(made)));
            }
        }
    }
}

#[test]
fn each_signal_has_its_exit_status() {
    use rustix::process::Signal;
    let home = tempfile::tempdir().unwrap();
    let model = DemoOptions {
        layers: 12,
        hidden: 512,
        intermediate: 1408,
        heads: 8,
        kv_heads: 2,
        vocab: 4096,
        shards: 24,
        ..tiny()
    };
    demo_model::write(&home.path().join("model"), &model).unwrap();
    for (signal, status) in [(Signal::INT, 130), (Signal::TERM, 143), (Signal::HUP, 129)] {
        // A loaded machine may let a run finish before it is asked to stop.
        let stopped = (0..20).any(|attempt| {
            let _ = fs::remove_dir_all(home.path().join("out"));
            let _ = fs::remove_dir_all(home.path().join("out.partial"));
            let child = unweight(&["compress", "model", "-o", "out", "--threads", "1", "--json"])
                .current_dir(&home)
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap();
            while !home.path().join("out.partial/work").exists() && !home.path().join("out").exists() {
                std::thread::sleep(Duration::from_micros(200));
            }
            std::thread::sleep(Duration::from_millis(attempt));
            rustix::process::kill_process(rustix::process::Pid::from_child(&child), signal).unwrap();
            let output = child.wait_with_output().unwrap();
            if output.status.success() {
                return false;
            }
            assert_eq!(output.status.code(), Some(status), "{}", stderr(&output));
            assert_eq!(json(&output)["error"]["class"], "interrupted");
            true
        });
        assert!(stopped, "{signal:?}");
    }
}

#[test]
fn a_demo_asks_for_room_and_tidies_up_after_killed_ones() {
    let home = tempfile::tempdir().unwrap();
    let demo = |size: &str| {
        let mut command = unweight(&["demo", "--size", size]);
        command.env("TMPDIR", home.path()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    };
    let output = demo("900T").output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("are free"), "{}", stderr(&output));
    let left = || fs::read_dir(home.path()).unwrap().count();
    assert_eq!(left(), 0, "nothing is written before");
    let mut child = demo("256M").spawn().unwrap();
    let start = Instant::now();
    while left() == 0 && start.elapsed() < Duration::from_secs(30) {
        std::thread::sleep(Duration::from_millis(1));
    }
    // Until it has its lock.
    std::thread::sleep(Duration::from_millis(50));
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(left(), 1, "what a kill leaves");
    assert!(demo("1M").status().unwrap().success());
    assert_eq!(left(), 0, "the next demo removes it");
}

#[test]
fn kernels_that_were_not_kept_are_not_called_ready() {
    let home = tempfile::tempdir().unwrap();
    let compile = |limit: &str, nvrtc: Option<&Path>| {
        let script = format!("{limit} exec \"$0\" kernels compile uw_sm90a_encode_stats --json");
        let mut command = Command::new("bash");
        command.args(["-c", &script]).arg(assert_cmd::cargo::cargo_bin!("unweight"));
        command.env("UNWEIGHT_CACHE_DIR", home.path().join("cache")).env_remove("UNWEIGHT_JIT");
        nvrtc.map(|path| command.env("UNWEIGHT_NVRTC", path));
        command.output().unwrap()
    };
    // In KiB: room for nothing. Not the end of the process, and no success.
    let output = compile("ulimit -f 1;", None);
    assert_eq!(output.status.code(), Some(2), "{:?} {}", output.status, stderr(&output));
    assert!(stderr(&output).contains("not kept"), "{}", stderr(&output));
    documented("kernels compile", &json(&output));
    assert!(json(&output)["kernels"][0]["not_kept"].is_string());
    let output = compile("", None);
    assert!(output.status.success() && json(&output)["kernels"][0]["not_kept"].is_null());
    // A FIFO as compiler is refused, not waited for.
    let fifo = home.path().join("libnvrtc.so.13");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    let output = compile("rm -rf \"$UNWEIGHT_CACHE_DIR\";", Some(&fifo));
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("not a regular file"), "{}", stderr(&output));
}

#[test]
fn nothing_compressed_is_said_loudly() {
    let home = tempfile::tempdir().unwrap();
    fs::create_dir(home.path().join("i16")).unwrap();
    one_matrix(&home.path().join("i16/a.safetensors"), "model.layers.0.mlp.up_proj.weight");
    let path = home.path().join("i16/a.safetensors");
    let bytes = fs::read(&path).unwrap();
    let at = bytes.windows(6).position(|window| window == b"\"BF16\"").unwrap();
    // One byte shorter; a space takes its place.
    let header = [&bytes[..at], b"\"I16\" ", &bytes[at + 6..]].concat();
    copy(&fixture().join("model"), &home.path().join("model"));
    fs::write(&path, header).unwrap();
    let cases: [(&[&str], &str); 4] = [
        (&["compress", "i16", "-o", "a"], "BF16, F16, F32 and FP8 are compressed"),
        (&["plan", "i16"], "BF16, F16, F32 and FP8 are compressed"),
        (&["compress", "model", "-o", "b", "--include", "nothing"], "matches --include"),
        (&["compress", "model", "-o", "c", "--exclude", "*"], "--exclude matches"),
    ];
    for (arguments, help) in cases {
        let output = run(home.path(), arguments, 0);
        let text = stderr(&output);
        assert!(text.contains("warning: nothing was compressed") && text.contains(help), "{arguments:?}: {text}");
    }
    let report = json(&run(home.path(), &["compress", "i16", "-o", "d", "--json"], 0));
    assert_eq!(report["coded_tensors"], 0);
    assert!(report["saved_bytes"].as_i64().unwrap() < 0);
    let output = run(home.path(), &["compress", "model", "-o", "e", "--json"], 0);
    assert!(json(&output)["coded_tensors"].as_u64().unwrap() > 0 && !stderr(&output).contains("warning"));
    assert!(json(&output)["saved_bytes"].as_i64().unwrap() > 0);
}

#[test]
fn kernels_of_a_bundle_are_compiled_ahead() {
    assert!(
        std::env::var_os("UNWEIGHT_NVRTC").is_some(),
        "this test needs NVRTC: run `cargo xtask test`, which fetches it, or set UNWEIGHT_NVRTC"
    );
    let home = tempfile::tempdir().unwrap();
    demo_model::write(&home.path().join("model"), &tiny()).unwrap();
    run(home.path(), &["compress", "model", "-o", "bundle", "--profile", "resident"], 0);
    let cache = home.path().join("cache");
    let compile = || {
        let arguments = ["kernels", "compile", "--bundle", "bundle", "--max-batch", "8", "--json"];
        let output = unweight(&arguments).current_dir(home.path()).env("UNWEIGHT_CACHE_DIR", &cache).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        output
    };
    let first = compile();
    let kernels = json(&first)["kernels"].as_array().unwrap().clone();
    let names: Vec<&str> = kernels.iter().map(|kernel| kernel["name"].as_str().unwrap()).collect();
    // The packer's, and for merged gates and ups, and for what has no escapes, matmuls of batches up to 8; nothing for
    // larger ones. And what a model runs beside its linears.
    for part in [
        "repack_pack",
        "repack_unpack",
        "encode_stats",
        "_silu_mul",
        "_store_add",
        "_esc_pdl_store",
        "_attention_decode_",
        "_sample_",
    ] {
        assert!(names.iter().any(|name| name.contains(part)), "no {part} in {names:?}");
    }
    assert!(names.iter().all(|name| !name.contains("_gemm_wgmma_") && !name.contains("sm90a_decode_")), "{names:?}");
    assert!(stderr(&first).contains(&format!("{0}/{0}", names.len())), "a line per kernel");
    let second = json(&compile());
    assert!(second["kernels"].as_array().unwrap().iter().all(|kernel| kernel["state"] == "hit"), "{second}");
    run(home.path(), &["kernels", "compile", "--bundle", "bundle", "uw_sm90a_encode_stats"], 2);
    run(home.path(), &["kernels", "compile", "--max-batch", "8"], 2);
}

/// What is missing is told without a compiler.
#[test]
fn kernels_of_stored_mlps_are_told() {
    let home = tempfile::tempdir().unwrap();
    demo_model::write(&home.path().join("model"), &tiny()).unwrap();
    run(home.path(), &["compress", "model", "-o", "bundle", "--profile", "inference"], 0);
    let missing = |more: &[&str]| {
        let attach = [&["kernels", "attach", "bundle", "--arch", "sm_90a"], more].concat();
        let output = unweight(&attach)
            .current_dir(&home)
            .env("UNWEIGHT_CACHE_DIR", home.path().join("empty"))
            .env("UNWEIGHT_NVRTC", home.path().join("nowhere.so"))
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
        stderr(&output)
    };
    let linears = missing(&[]);
    assert!(linears.contains("uw_sm90a_gemm_") && !linears.contains("_gemm_recon_"), "{linears}");
    let stored = missing(&["--mlp", "stored"]);
    // Palettes of odd layers, exponents of even ones, what is decoded for them, down's sums.
    for name in [
        "_gemm_recon_palette_n1p6s2_",
        "_gemm_recon_exponent_n1p6_",
        "_decode_full_",
        "_decode_exponent_",
        "_store_add",
    ] {
        assert!(stored.contains(name), "no {name} in {stored}");
    }
    let alternate = missing(&["--mlp", "alternate"]);
    assert!(alternate.contains("_decode_palette_"), "{alternate}");

    // A plan is in nobody's way.
    attach_plan(&home.path().join("bundle"), "{\"version\": 1}");
    assert_eq!(missing(&["--mlp", "stored"]), stored);
    assert_eq!(json(&run(home.path(), &["inspect", "bundle", "--json"], 0))["attached_plan"], true);
    assert!(stdout(&run(home.path(), &["inspect", "bundle"], 0)).ends_with("a plan of `tune` is attached\n"));
    let detached = stdout(&run(home.path(), &["kernels", "detach", "bundle"], 0));
    assert!(detached.contains("removed with the plan of `tune`"), "{detached}");
    assert_eq!(json(&run(home.path(), &["inspect", "bundle", "--json"], 0))["attached_plan"], false);
}

#[test]
fn a_bundle_carries_its_kernels() {
    assert!(
        std::env::var_os("UNWEIGHT_NVRTC").is_some(),
        "this test needs NVRTC: run `cargo xtask test`, which fetches it, or set UNWEIGHT_NVRTC"
    );
    let home = tempfile::tempdir().unwrap();
    demo_model::write(&home.path().join("model"), &tiny()).unwrap();
    run(home.path(), &["compress", "model", "-o", "bundle", "--profile", "resident"], 0);
    let in_home = |arguments: &[&str], status: i32| {
        let cache = home.path().join("cache");
        let output = unweight(arguments).current_dir(&home).env("UNWEIGHT_CACHE_DIR", cache).output().unwrap();
        assert_eq!(output.status.code(), Some(status), "{arguments:?} {}", stderr(&output));
        output
    };
    let attach = ["kernels", "attach", "bundle", "--max-batch", "8", "--json"];
    let attached = json(&in_home(&attach, 0));
    documented("kernels attach", &attached);
    let count = attached["kernels"].as_array().unwrap().len();
    let refused = in_home(&attach[..3], 2);
    assert!(stderr(&refused).contains("--force"), "{}", stderr(&refused));
    let again = json(&in_home(&[&attach[..], &["--force"]].concat(), 0));
    assert!(again["kernels"].as_array().unwrap().iter().all(|kernel| kernel["state"] == "hit"), "{again}");
    assert_eq!(again["bytes"], attached["bytes"]);
    // Of an architecture by its name every shape that ships, since which of them a card asks for is the card's; what is
    // missing is told without a compiler.
    let every = unweight(&["kernels", "attach", "bundle", "--arch", "sm_89", "--max-batch", "8", "--force"])
        .current_dir(&home)
        .env("UNWEIGHT_CACHE_DIR", home.path().join("empty"))
        .env("UNWEIGHT_NVRTC", home.path().join("nowhere.so"))
        .output()
        .unwrap();
    assert_eq!(every.status.code(), Some(2), "{}", stderr(&every));
    let asked = |spec: &VariantSpec| matches!(spec.op, Op::GemmMma(op) if op.escapes && !op.dump);
    for spec in catalog::on::<GemmMmaSpec>(Arch::Sm89).filter(asked) {
        assert!(stderr(&every).contains(&spec.to_string()), "no {spec} in {}", stderr(&every));
    }

    let verified = json(&in_home(&["verify", "bundle", "--against", "model", "--json"], 0));
    documented("verify", &verified);
    assert_eq!(verified["attached_kernels"], count);
    let inspected = json(&in_home(&["inspect", "bundle", "--json"], 0));
    documented("inspect", &inspected);
    assert_eq!(inspected["attached_kernels"].as_array().unwrap().len(), count);
    let text = stdout(&in_home(&["inspect", "bundle"], 0));
    assert!(text.contains(&format!("{count} kernels are attached for sm_90a, by nvrtc ")), "{text}");
    in_home(&["decompress", "bundle", "-o", "restored"], 0);
    same(&home.path().join("model"), &home.path().join("restored"));

    // What loading this bundle and running it asks for, on a machine without NVRTC.
    let bundle = Bundle::open(&home.path().join("bundle")).unwrap();
    let mut specs = reachable(&bundle, LoadOptions::default().max_batch(8), PackedChooser::h200());
    specs.extend(Engine::kernels(&bundle, &EngineOptions::default(), &[Machine::H200]).unwrap());
    let requests: Vec<_> = specs.iter().map(|spec| CompileRequest::render(spec).unwrap()).collect();
    assert!(requests.len() > 20, "{}", requests.len());
    let mut env = Env::process().unwrap().clone();
    env.nvrtc = Some(home.path().join("nowhere.so"));
    let bare = |name: &str| {
        let policy = Policy { mode: JitMode::Auto, lock_timeout: Duration::from_secs(1) };
        KernelCache::new(policy, Some(&home.path().join(name)), Arc::new(NvrtcCompiler::new(&env)))
    };
    let trusting = bare("trusting").trust(bundle.attached().unwrap().unwrap());
    let artifacts = trusting.compile_all(&requests, 2, &|_| {}).unwrap();
    for (request, artifact) in requests.iter().zip(&artifacts) {
        assert_eq!((&artifact.name, &artifact.state), (&request.name, &CacheState::Attached));
    }
    // The very ones that were compiled, though nothing is said of them but their bytes.
    let policy = Policy { mode: JitMode::CacheOnly, lock_timeout: Duration::from_secs(1) };
    let own = KernelCache::new(policy, Some(&home.path().join("cache")), Arc::new(NvrtcCompiler::new(&env)));
    for (own, artifact) in own.compile_all(&requests, 2, &|_| {}).unwrap().iter().zip(&artifacts) {
        assert_eq!(own.cubin, artifact.cubin);
        assert_eq!((&own.resources, &own.compiler), (&artifact.resources, &artifact.compiler));
    }
    let different: BTreeSet<_> = requests.iter().map(|request| &request.name).collect();
    let error = bare("careful").compile_all(&requests, 2, &|_| {}).unwrap_err();
    let Error::NotCached { missing, .. } = &error else { panic!("{error}") };
    assert_eq!(missing.len(), different.len(), "without a word of trust nothing of the bundle is used");

    // Whoever runs it hears of them, once.
    let generate = ["generate", "bundle", "--tokens", "1,2", "-n", "1", "--device", "99"];
    let note = "attached kernels are run only with --trust-attached-kernels";
    assert_eq!(stderr(&in_home(&generate, 2)).matches(note).count(), 1);
    let trusted = [&generate[..], &["--trust-attached-kernels"]].concat();
    assert!(!stderr(&in_home(&trusted, 2)).contains("attached"));

    let path = home.path().join("bundle/unweight.kernels");
    let mut bytes = fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&path, bytes).unwrap();
    let damaged = json(&in_home(&["verify", "bundle", "--json"], 1));
    assert_eq!(damaged["problems"][0]["file"], "unweight.kernels");
    assert!(stderr(&in_home(&["verify", "bundle"], 1)).contains("`unweight kernels detach` removes what is attached"));
    // Whoever replaces a damaged file hears what became of a plan in it.
    in_home(&["kernels", "detach", "bundle"], 0);
    attach_plan(&home.path().join("bundle"), "{\"version\": 1}");
    in_home(&attach, 0);
    let bytes = fs::read(&path).unwrap();
    let left = home.path().join("bundle/unweight.kernels.partial");
    fs::write(&left, "half").unwrap();
    let text = stderr(&in_home(&["verify", "bundle"], 1));
    assert!(text.contains("nothing that the bundle lists is damaged: run again what was interrupted"), "{text}");
    fs::remove_file(&left).unwrap();
    for (kept, plan) in [(bytes.len() - 1, "its plan of `tune` was sound, and stays"), (100, "is gone")] {
        fs::write(&path, &bytes[..kept]).unwrap();
        let said = stderr(&in_home(&[&attach[..], &["--force"]].concat(), 0));
        assert!(said.contains("what was attached is replaced (unweight.kernels: ") && said.contains(plan), "{said}");
        let stays = json(&in_home(&["inspect", "bundle", "--json"], 0));
        assert_eq!(stays["attached_plan"], plan.ends_with("stays"));
    }
    fs::write(&path, "unweight.kernels").unwrap();
    assert!(stderr(&in_home(&trusted, 2)).contains("not used: unweight.kernels: cut off at byte 16"));
    assert!(stderr(&in_home(&["inspect", "bundle"], 0)).contains("unweight.kernels: cut off at byte 16"));
    let detached = json(&in_home(&["kernels", "detach", "bundle", "--json"], 0));
    documented("kernels detach", &detached);
    assert_eq!((&detached["detached"], &detached["bytes"]), (&true.into(), &16.into()));
    assert_eq!(json(&in_home(&["kernels", "detach", "bundle", "--json"], 0))["detached"], false);
    assert_eq!(json(&in_home(&["verify", "bundle", "--json"], 0))["attached_kernels"], 0);
    assert!(stderr(&in_home(&trusted, 2)).contains("the bundle has no attached kernels"));
}

#[test]
fn a_tensor_is_extracted_as_it_was() {
    let home = tempfile::tempdir().unwrap();
    fs::create_dir(home.path().join("model")).unwrap();
    one_matrix(&home.path().join("model/a.safetensors"), "x.mlp.up_proj.weight");
    one_matrix(&home.path().join("model/b.safetensors"), "x.mlp.up_proj.weight");
    run(home.path(), &["compress", "model", "-o", "bundle"], 0);
    run(home.path(), &["verify", "bundle", "--ram", "1M", "--threads", "1"], 0);
    let weights = unweight::format::testing::Weights::TRAINED.bytes(4096, 1);
    let extract = ["extract", "bundle", "--tensor", "x.mlp.up_proj.weight", "-o"];
    // Two files have it: which one is asked for must be said.
    let output = run(home.path(), &[&extract[..], &["x.bin"]].concat(), 2);
    assert!(stderr(&output).contains("a.safetensors, b.safetensors"), "{}", stderr(&output));
    run(home.path(), &[&extract[..], &["x.bin", "--file", "b.safetensors"]].concat(), 0);
    assert!(fs::read(home.path().join("x.bin")).unwrap() == weights);
    run(home.path(), &[&extract[..], &["x.bin", "--file", "b.safetensors"]].concat(), 2);
    let output = run(home.path(), &[&extract[..], &["-", "--file", "a.safetensors"]].concat(), 0);
    assert!(output.stdout == weights);
}

/// A bundle is what its headers say, as far as these go.
#[test]
fn a_quick_verification_reads_no_weights() {
    let home = tempfile::tempdir().unwrap();
    let shard = damaged(home.path());
    let report = json(&run(home.path(), &["verify", "bundle", "--quick", "--json"], 0));
    assert_eq!((&report["quick"], &report["tensors"]), (&true.into(), &0.into()));
    let all = json(&run(home.path(), &["verify", "bundle", "--json"], 1));
    assert_eq!(all["quick"], false);
    assert!(report["stored_bytes"].as_u64().unwrap() * 10 < all["stored_bytes"].as_u64().unwrap());
    assert!(stdout(&run(home.path(), &["verify", "bundle", "--quick"], 0)).contains("as far as"));
    // A header is looked at, and so are size and presence of every file.
    let path = home.path().join("bundle").join(&shard);
    let sound = fs::read(&path).unwrap();
    let mut bytes = sound.clone();
    bytes[20] ^= 1;
    fs::write(&path, &bytes).unwrap();
    assert!(stdout(&run(home.path(), &["verify", "bundle", "--quick"], 1)).contains("header"));
    fs::write(&path, &sound[..sound.len() - 1]).unwrap();
    assert!(stdout(&run(home.path(), &["verify", "bundle", "--quick"], 1)).contains("truncated"));
    fs::write(&path, &sound).unwrap();
    fs::write(home.path().join("bundle/stray"), "").unwrap();
    assert!(stdout(&run(home.path(), &["verify", "bundle", "--quick"], 1)).contains("stray"));
    fs::remove_file(home.path().join("bundle/stray")).unwrap();
    // Against a source: names and sizes.
    copy(&fixture().join("model"), &home.path().join("model"));
    run(home.path(), &["verify", "bundle", "--quick", "--against", "model"], 0);
    let config = home.path().join("model/config.json");
    fs::write(&config, [fs::read(&config).unwrap(), b" ".to_vec()].concat()).unwrap();
    let output = run(home.path(), &["verify", "bundle", "--quick", "--against", "model"], 1);
    assert!(stdout(&output).contains("config.json"), "{}", stdout(&output));
}

#[test]
fn a_file_is_extracted_as_it_was() {
    let home = tempfile::tempdir().unwrap();
    let model = fixture().join("model");
    let arguments = ["compress", model.to_str().unwrap(), "-o", "bundle", "--sha256"];
    run(home.path(), &arguments, 0);
    for entry in fs::read_dir(&model).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let original = fs::read(model.join(&name)).unwrap();
        let output = run(home.path(), &["extract", "bundle", "--file", &name, "-o", "-", "--ram", "1M"], 0);
        assert!(output.stdout == original, "{name}");
        let report = json(&run(home.path(), &["extract", "bundle", "--file", &name, "-o", &name, "--json"], 0));
        assert!(fs::read(home.path().join(&name)).unwrap() == original, "{name}");
        assert_eq!((&report["bytes"], &report["file"]), (&original.len().into(), &name.as_str().into()));
        assert!(report["sha256"].is_string());
        // What is there stays.
        run(home.path(), &["extract", "bundle", "--file", &name, "-o", &name], 2);
    }
    let output = run(home.path(), &["extract", "bundle", "--file", "nothing.json", "-o", "x"], 2);
    assert!(stderr(&output).contains("no file 'nothing.json'"), "{}", stderr(&output));
    assert!(stderr(&run(home.path(), &["extract", "bundle", "-o", "x"], 2)).contains("--tensor"));
    // Of a damaged shard nothing appears under the name.
    let home = tempfile::tempdir().unwrap();
    let shard = damaged(home.path());
    run(home.path(), &["extract", "bundle", "--file", &shard, "-o", "x"], 1);
    assert_eq!(fs::read_dir(home.path()).unwrap().count(), 1, "only the bundle");
}

#[test]
fn what_nobody_wants_is_said_and_left_out() {
    let home = tempfile::tempdir().unwrap();
    let model = home.path().join("model");
    copy(&fixture().join("model"), &model);
    fs::create_dir_all(model.join(".git/objects")).unwrap();
    for name in [".git/objects/a", ".git/objects/b"] {
        fs::write(model.join(name), vec![7; 600 << 10]).unwrap();
    }
    fs::write(model.join("pytorch_model.bin"), vec![7; 2 << 20]).unwrap();
    // Nothing that a bundle could hold; left out, it is not even looked at.
    std::os::unix::fs::symlink("nowhere", model.join(".git/dangling")).unwrap();
    assert!(stderr(&run(home.path(), &["compress", "model", "-o", "bundle"], 2)).contains("dangling"));
    fs::remove_file(model.join(".git/dangling")).unwrap();
    for arguments in [&["plan", "model"][..], &["compress", "model", "-o", "all"]] {
        let text = stderr(&run(home.path(), arguments, 0));
        assert!(text.contains("pytorch_model.bin (2.00 MiB), .git (1.17 MiB)"), "{text}");
        assert!(text.contains("--skip '*.bin'"), "{text}");
    }
    let report = json(&run(home.path(), &["plan", "model", "--json", "--skip", "*.bin"], 0));
    assert_eq!(report["large_copies"], serde_json::json!([{ "name": ".git", "bytes": 2 * (600 << 10) }]));
    std::os::unix::fs::symlink("nowhere", model.join(".git/dangling")).unwrap();
    let output = run(home.path(), &["compress", "model", "-o", "less", "--skip", "*.bin", "--skip", ".git"], 0);
    assert_eq!(stderr(&output), "");
    run(home.path(), &["decompress", "less", "-o", "restored"], 0);
    same(&fixture().join("model"), &home.path().join("restored"));
    let against = ["verify", "less", "--against", "model"];
    run(home.path(), &[&against[..], &["--skip", "*.bin", "--skip", ".git"]].concat(), 0);
    let output = run(home.path(), &[&against[..], &["--skip", ".git"]].concat(), 1);
    assert!(stdout(&output).contains("pytorch_model.bin: in the source, but not in the bundle"), "{}", stdout(&output));
    // Weights beside others are never left out by themselves.
    run(home.path(), &["compress", "model", "-o", "weights", "--skip", "*"], 0);
    assert_eq!(shards(&home.path().join("weights")).len(), 2);
    assert!(!home.path().join("weights/config.json").exists());
}

#[test]
fn a_comparison_says_what_each_plan_says() {
    let home = tempfile::tempdir().unwrap();
    copy(&fixture().join("model"), &home.path().join("model"));
    let report = json(&run(home.path(), &["plan", "model", "--compare", "--json"], 0));
    let rows = report["rows"].as_array().unwrap();
    // Two profiles with ten limits, three without Huffman codes.
    assert_eq!(rows.len(), 23);
    for (profile, limit) in
        [("distribution", 6), ("distribution", 15), ("inference", 7), ("palette", 7), ("compact", 7)]
    {
        let plan = ["plan", "model", "--json", "--profile", profile, "--code-limit", &limit.to_string()];
        let plan = json(&run(home.path(), &plan, 0));
        let of_profile = |row: &&Value| row["profile"] == profile;
        let own = |row: &&Value| row["code_limit"] == limit || row["code_limit"].is_null();
        let row = rows.iter().filter(of_profile).find(own).unwrap();
        assert_eq!(row["stored_bytes"], plan["stored_bytes"], "{profile} {limit}");
        let sum =
            |key: &str| row["roles"].as_array().unwrap().iter().map(|role| role[key].as_u64().unwrap()).sum::<u64>();
        let tensors = plan["tensors"].as_array().unwrap();
        assert_eq!(sum("tensors"), tensors.len() as u64);
        assert_eq!(sum("stored_bytes"), tensors.iter().map(|t| t["stored_bytes"].as_u64().unwrap()).sum::<u64>());
    }
    let table = stdout(&run(home.path(), &["plan", "model", "--compare", "--scope", "mlp"], 0));
    assert_eq!(table.lines().count(), 1 + 1 + 23 + 1, "{table}");
    assert!(table.contains("(source)") && table.contains("attention") && !table.contains(" all  "), "{table}");
    run(home.path(), &["plan", "model", "--compare", "--profile", "palette"], 2);
    run(home.path(), &["plan", "nowhere", "--compare"], 2);
}

// ---- where a model may be ----

#[test]
fn a_model_may_be_files_or_a_pattern() {
    let home = tempfile::tempdir().unwrap();
    copy(&fixture().join("model"), &home.path().join("model"));
    let [first, second] = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
    let files = |bundle: &str| -> Vec<String> {
        run(home.path(), &["decompress", bundle, "-o", &format!("{bundle}.back")], 0);
        let mut names: Vec<String> = Vec::new();
        for entry in fs::read_dir(home.path().join(format!("{bundle}.back"))).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            let original = fs::read(home.path().join("model").join(&name)).unwrap();
            assert!(fs::read(home.path().join(format!("{bundle}.back")).join(&name)).unwrap() == original, "{name}");
            names.push(name);
        }
        names.sort();
        names
    };
    let path = |name: &str| format!("model/{name}");
    // One file, whose folder may hold the output, too.
    run(home.path(), &["compress", &path(first), "-o", "model/one"], 0);
    fs::rename(home.path().join("model/one"), home.path().join("one")).unwrap();
    assert_eq!(files("one"), [first]);
    run(home.path(), &["compress", &path(second), &path(first), &path("config.json"), "-o", "list"], 0);
    assert_eq!(files("list"), ["config.json", first, second]);
    run(home.path(), &["compress", "model/*.safetensors*", "-o", "pattern"], 0);
    assert_eq!(files("pattern"), [first, second, "model.safetensors.index.json"]);
    run(home.path(), &["verify", "one", "--against", &path(first)], 0);
    run(home.path(), &["verify", "one", "--against", &path(second)], 1);
    assert_eq!(json(&run(home.path(), &["plan", &path(first), "--json"], 0))["files"], 1);
    let mistakes: [(&[&str], &str); 7] = [
        (&["model/*.gguf"], "no file matches"),
        (&["model", "model/config.json"], "a directory among several"),
        (&["model/config.json"], "no .safetensors file"),
        (&["model/model.safetensors.index.json", &path(first)], "is missing"),
        (&["a/b/c"], "no such file or directory"),
        (&[&path(first), "nothing.safetensors"], "nothing.safetensors"),
        (&["-", "model"], "give - alone"),
    ];
    for (sources, why) in mistakes {
        let output = run(home.path(), &[&["compress", "-o", "out"], sources].concat(), 2);
        assert!(stderr(&output).contains(why), "{sources:?}: {}", stderr(&output));
        assert!(!home.path().join("out").exists() && !home.path().join("out.partial").exists());
    }
    // The output must not take the place of a source.
    run(home.path(), &["compress", &path(first), "-o", "model", "--force"], 2);
    same(&fixture().join("model"), &home.path().join("model"));
}

#[test]
fn a_model_may_lie_in_the_cache_of_the_hub() {
    let home = tempfile::tempdir().unwrap();
    let model = home.path().join("hub/models--org--tiny");
    let commit = "0123456789abcdef0123456789abcdef01234567";
    let (blobs, snapshot) = (model.join("blobs"), model.join("snapshots").join(commit));
    copy(&fixture().join("model"), &blobs);
    fs::create_dir_all(&snapshot).unwrap();
    for entry in fs::read_dir(&blobs).unwrap() {
        let name = entry.unwrap().file_name();
        std::os::unix::fs::symlink(Path::new("../../blobs").join(&name), snapshot.join(&name)).unwrap();
    }
    fs::create_dir_all(model.join("refs")).unwrap();
    fs::write(model.join("refs/main"), commit).unwrap();
    let with = |arguments: &[&str], status: i32| {
        let mut command = unweight(arguments);
        for variable in ["HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"] {
            command.env_remove(variable);
        }
        let output = command.current_dir(&home).env("HF_HOME", home.path()).output().unwrap();
        assert_eq!(output.status.code(), Some(status), "{arguments:?} {}", stderr(&output));
        output
    };
    with(&["compress", "org/tiny", "-o", "bundle"], 0);
    with(&["verify", "bundle", "--against", &format!("org/tiny@{commit}")], 0);
    with(&["decompress", "bundle", "-o", "restored"], 0);
    same(&fixture().join("model"), &home.path().join("restored"));
    let text = stderr(&with(&["plan", "org/other"], 2));
    assert!(text.contains("hub/models--org--other") && text.contains("hf download org/other"), "{text}");
    let text = stderr(&with(&["plan", "org/tiny@v2"], 2));
    assert!(text.contains("'v2'") && text.contains("refs/v2") && text.contains(commit), "{text}");
    // A reference that leads elsewhere is not followed.
    fs::write(model.join("refs/main"), "../../..").unwrap();
    with(&["plan", "org/tiny"], 2);
    // What has not been fetched to the end is refused as any model is.
    fs::write(model.join("refs/main"), commit).unwrap();
    fs::remove_file(snapshot.join("model-00002-of-00002.safetensors")).unwrap();
    assert!(stderr(&with(&["plan", "org/tiny"], 2)).contains("is missing"));
}

/// Runs with `input` on stdin.
fn piped(folder: &Path, arguments: &[&str], input: &[u8], status: i32) -> Output {
    use std::io::Write;
    let mut command = unweight(arguments);
    command.current_dir(folder).env("TMPDIR", folder.join("tmp"));
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let output = std::thread::scope(|scope| {
        // It may stop reading before the end.
        scope.spawn(move || drop(stdin.write_all(input)));
        child.wait_with_output().unwrap()
    });
    assert_eq!(output.status.code(), Some(status), "{arguments:?} {}", stderr(&output));
    output
}

fn tar(folder: &Path, arguments: &[&str]) -> Vec<u8> {
    let output = Command::new("tar").args(arguments).current_dir(folder).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    output.stdout
}

#[test]
fn models_and_bundles_go_through_pipes() {
    let home = tempfile::tempdir().unwrap();
    fs::create_dir(home.path().join("tmp")).unwrap();
    let model = fixture().join("model");
    // Of what is in a folder, and of the folder.
    let plain = tar(&model, &["-c", "."]);
    let folder = tar(fixture(), &["-c", "model"]);
    piped(home.path(), &["compress", "-", "-o", "sub/bundle"], &plain, 0);
    same(&fixture().join("bundle"), &home.path().join("sub/bundle"));
    assert_eq!(fs::read_dir(home.path().join("sub")).unwrap().count(), 1, "nothing is left beside it");
    let packed = piped(home.path(), &["compress", "-", "-o", "-"], &folder, 0).stdout;
    assert!(packed.len() < plain.len() * 8 / 10);
    // The standard tool opens it.
    fs::write(home.path().join("packed.tar"), &packed).unwrap();
    fs::create_dir(home.path().join("by-tar")).unwrap();
    tar(&home.path().join("by-tar"), &["-x", "-f", "../packed.tar"]);
    same(&fixture().join("bundle"), &home.path().join("by-tar"));
    piped(home.path(), &["decompress", "-", "-o", "restored"], &packed, 0);
    same(&model, &home.path().join("restored"));
    let original = piped(home.path(), &["decompress", "-", "-o", "-"], &packed, 0).stdout;
    fs::write(home.path().join("original.tar"), &original).unwrap();
    fs::create_dir(home.path().join("again")).unwrap();
    tar(&home.path().join("again"), &["-x", "-f", "../original.tar"]);
    same(&model, &home.path().join("again"));
    // From a directory, too.
    let bundle = fixture().join("bundle");
    let from_folder = piped(home.path(), &["decompress", bundle.to_str().unwrap(), "-o", "-"], b"", 0).stdout;
    assert!(from_folder == original, "times and modes of the files, too");
    let files = fs::read_dir(&model).unwrap().count();
    assert_eq!(json(&piped(home.path(), &["plan", "-", "--json"], &folder, 0))["files"], files);
    // Cut off, damaged, or no archive: nothing appears, and nothing stays.
    let before = fs::read_dir(home.path()).unwrap().count();
    for cut in [0, 100, 512, packed.len() / 2, packed.len() - 1024] {
        piped(home.path(), &["decompress", "-", "-o", "out"], &packed[..cut], 2);
    }
    let mut damaged = packed.clone();
    let at = damaged.len() / 2;
    damaged[at] ^= 1;
    piped(home.path(), &["decompress", "-", "-o", "out"], &damaged, 1);
    let begun = piped(home.path(), &["decompress", "-", "-o", "-"], &damaged, 1);
    assert!(begun.stdout.len() < original.len(), "no mark of an end");
    let output = piped(home.path(), &["compress", "-", "-o", "out"], b"no archive", 2);
    assert!(stderr(&output).contains("archive on stdin"), "{}", stderr(&output));
    for option in ["--json", "--resume", "--force"] {
        piped(home.path(), &["compress", "-", "-o", "-", option], &plain, 2);
        piped(home.path(), &["decompress", "-", "-o", "-", option], &packed, 2);
    }
    // What is there is known before anything is read.
    piped(home.path(), &["compress", "-", "-o", "restored"], b"no archive", 2);
    assert_eq!(fs::read_dir(home.path()).unwrap().count(), before + 1, "only what is left of the one that was damaged");
    assert!(home.path().join("out.partial").is_dir());
    assert_eq!(fs::read_dir(home.path().join("tmp")).unwrap().count(), 0);
}

/// A key with a password signs with the password's file, and not without, or with another.
#[test]
fn a_key_may_have_a_password() {
    let home = tempfile::tempdir().unwrap();
    copy(&fixture().join("model"), &home.path().join("model"));
    let write = |name: &str, text: &str| fs::write(home.path().join(name), text).unwrap();
    let keys = minisign::KeyPair::generate_encrypted_keypair(Some("two words".into())).unwrap();
    write("mine.key", &keys.sk.to_box(None).unwrap().to_string());
    write("mine.pub", &keys.pk.to_box().unwrap().into_string());
    write("right", "two words\nand a second line\n");
    write("wrong", "two word\n");
    write("empty", "");
    let sign = |password: &[&str], status: i32| {
        run(home.path(), &[&["compress", "model", "-o", "bundle", "--sign", "mine.key"], password].concat(), status)
    };
    for password in [&[][..], &["--password-file", "wrong"], &["--password-file", "empty"]] {
        let output = sign(password, 2);
        let message = stderr(&output);
        assert!(message.contains("mine.key") && message.contains("--password-file"), "{password:?}: {message}");
        assert!(!message.contains("two word") && !home.path().join("bundle").exists(), "{password:?}: {message}");
    }
    let missing = stderr(&sign(&["--password-file", "nowhere"], 2));
    assert!(missing.contains("nowhere"), "{missing}");
    sign(&["--password-file", "right"], 0);
    run(home.path(), &["verify", "bundle", "--key", "mine.pub"], 0);
}

/// What several machines made is what one would have made.
#[test]
fn parts_are_merged() {
    let home = tempfile::tempdir().unwrap();
    copy(&fixture().join("model"), &home.path().join("model"));
    run(home.path(), &["compress", "model", "-o", "whole", "--sha256"], 0);
    for part in ["1/3", "2/3", "3/3"] {
        let folder = format!("parts/{}", &part[..1]);
        let arguments = ["compress", "model", "-o", &folder, "--shard", part, "--sha256", "--json"];
        let report = json(&run(home.path(), &arguments, 0));
        assert_eq!(report["part"], part);
        documented("compress", &report);
    }
    // Two shards for three parts.
    let output = run(home.path(), &["compress", "model", "-o", "empty", "--shard", "3/3", "-q"], 0);
    assert_eq!(stderr(&output), "");
    fs::remove_dir_all(home.path().join("empty")).unwrap();
    let text = stderr(&run(home.path(), &["compress", "model", "-o", "empty", "--shard", "3/3"], 0));
    assert!(text.contains("part 3/3 has no weights: a file is never split"), "{text}");
    assert!(!text.contains("nothing was compressed"), "{text}");

    let arguments = ["merge", "parts/3", "parts/1", "parts/2", "-o", "bundle", "--json"];
    documented("merge", &json(&run(home.path(), &arguments, 0)));
    same(&home.path().join("whole"), &home.path().join("bundle"));
    let text = stderr(&run(home.path(), &["merge", "parts/1", "parts/2", "-o", "other"], 2));
    assert!(text.contains("part 3/3 is missing"), "{text}");
    let text = stderr(&run(home.path(), &["verify", "parts/2"], 2));
    assert!(text.contains("part 2/3 of a bundle") && text.contains("merge all parts first"), "{text}");
    run(home.path(), &["merge", "parts/1", "parts/2", "parts/3", "-o", "bundle"], 2);
    let again = ["merge", "parts/1", "parts/2", "parts/3", "-o", "bundle", "--force", "--verify", "none"];
    assert!(stdout(&run(home.path(), &again, 0)).contains("of 3 parts"));
    for (wrong, expected) in [
        (&["--shard", "4/3"][..], "write I/N, such as 2/5"),
        (&["--shard", "1/2", "--sign", "key"], "cannot be used with"),
    ] {
        let text = stderr(&run(home.path(), &[&["compress", "model", "-o", "x"], wrong].concat(), 2));
        assert!(text.contains(expected), "{text}");
    }
    let text = stderr(&run(home.path(), &["compress", "model", "-o", "-", "--shard", "1/2"], 2));
    assert!(text.contains("--shard"), "{text}");
}

/// What the dfloat11 package wrote is a source, and is made again.
#[test]
fn dfloat11_there_and_back() {
    let home = tempfile::tempdir().unwrap();
    let stock = Path::new(env!("CARGO_MANIFEST_DIR")).join("unweight-rivals/tests/fixtures/dfloat11/model");
    copy(&stock, &home.path().join("df11"));
    let report = json(&run(home.path(), &["convert", "df11", "-o", "plain", "--to", "bf16", "--json"], 0));
    documented("convert --to bf16", &report);
    assert_eq!((&report["units"], &report["weights"]), (&4.into(), &16.into()));
    let output = run(home.path(), &["compress", "df11", "-o", "bundle", "--profile", "resident"], 0);
    assert!(stderr(&output).contains("a DFloat11 model: 16 weights of 4 units"), "{}", stderr(&output));
    run(home.path(), &["decompress", "bundle", "-o", "restored"], 0);
    same(&home.path().join("plain"), &home.path().join("restored"));
    let left: Vec<_> = fs::read_dir(home.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left.len(), 4, "nothing is left beside the outputs: {left:?}");
    assert!(stdout(&run(home.path(), &["plan", "df11"], 0)).contains("lm_head.weight"));

    let report = json(&run(home.path(), &["convert", "bundle", "-o", "again", "--to", "dfloat11", "--json"], 0));
    documented("convert --to dfloat11", &report);
    for name in ["lm_head", "model_embed_tokens", "model_layers_0", "model_layers_1"] {
        let name = format!("{name}.safetensors");
        assert!(
            fs::read(home.path().join("again").join(&name)).unwrap() == fs::read(stock.join(&name)).unwrap(),
            "{name}"
        );
    }
    let summary = stdout(&run(home.path(), &["convert", "plain", "-o", "third", "--to", "dfloat11"], 0));
    assert!(summary.contains("16 weights in 4 units"), "{summary}");
    same(&home.path().join("again"), &home.path().join("third"));

    for (arguments, status, expected) in [
        (["convert", "plain", "-o", "third", "--to", "dfloat11"], 2, "output exists\n  help: choose another name\n"),
        (["convert", "df11", "-o", "x", "--to", "dfloat11"], 2, "a DFloat11 model already"),
        (["convert", "plain", "-o", "x", "--to", "bf16"], 2, "this is no DFloat11 model"),
    ] {
        let text = stderr(&run(home.path(), &arguments, status));
        assert!(text.contains(expected), "{text}");
    }
    // Without a sound configuration its files are tensors of bytes: not in silence.
    copy(&stock, &home.path().join("cut"));
    let config = fs::read(stock.join("config.json")).unwrap();
    fs::write(home.path().join("cut/config.json"), &config[..config.len() - 2]).unwrap();
    for arguments in
        [&["compress", "cut", "-o", "x"][..], &["plan", "cut"], &["convert", "cut", "-o", "x", "--to", "bf16"]]
    {
        let text = stderr(&run(home.path(), arguments, 2));
        let expected = format!("cut/config.json: byte {}: it ends within its JSON object", config.len() - 2);
        assert!(text.contains(&expected) && text.contains("again"), "{text}");
        assert!(!home.path().join("x").exists() && !home.path().join("x.partial").exists());
    }
    run(home.path(), &["compress", "cut/lm_head.safetensors", "-o", "x"], 0);
    fs::remove_dir_all(home.path().join("x")).unwrap();
    // A flipped bit that shifts the codes behind it is data that is not what it should be.
    let file = home.path().join("df11/lm_head.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    bytes[1501] ^= 1;
    fs::write(&file, bytes).unwrap();
    for arguments in [&["convert", "df11", "-o", "x", "--to", "bf16"][..], &["compress", "df11", "-o", "x"]] {
        let text = stderr(&run(home.path(), arguments, 1));
        assert!(text.contains("lm_head.safetensors: unit 'lm_head' at byte"), "{text}");
        assert!(!home.path().join("x").exists());
    }
}

/// A model that names its file of weights itself cannot be marked as a bundle.
#[test]
fn a_configuration_that_stays_as_it_is_is_remarked_on() {
    let home = tempfile::tempdir().unwrap();
    copy(&fixture().join("model"), &home.path().join("model"));
    run(home.path(), &["compress", "model", "-o", "marked"], 0);
    let own = fs::read_to_string(home.path().join("marked/config.json")).unwrap();
    assert!(own.contains("\"transformers_weights\": \"unweight.json\""), "{own}");
    let config = home.path().join("model/config.json");
    let own = "{\"transformers_weights\": \"model.safetensors\",";
    let text = fs::read_to_string(&config).unwrap().replacen('{', own, 1);
    fs::write(&config, text).unwrap();
    for arguments in [&["plan", "model"][..], &["compress", "model", "-o", "bundle"]] {
        let text = stderr(&run(home.path(), arguments, 0));
        assert!(text.contains("config.json is copied as it is (it has transformers_weights of its own)"), "{text}");
    }
    let report = json(&run(home.path(), &["plan", "model", "--json"], 0));
    assert_eq!(report["unmarked_configs"][0]["name"], "config.json");
    documented("plan", &report);
    assert!(fs::read(&config).unwrap() == fs::read(home.path().join("bundle/config.json")).unwrap());
}

#[test]
fn a_signed_bundle_tells_who_made_it() {
    let home = tempfile::tempdir().unwrap();
    copy(&fixture().join("model"), &home.path().join("model"));
    for name in ["mine", "theirs"] {
        let keys = minisign::KeyPair::generate_unencrypted_keypair().unwrap();
        fs::write(home.path().join(format!("{name}.key")), keys.sk.to_box(None).unwrap().to_string()).unwrap();
        fs::write(home.path().join(format!("{name}.pub")), keys.pk.to_box().unwrap().into_string()).unwrap();
    }
    run(home.path(), &["compress", "model", "-o", "bundle", "--sign", "mine.key"], 0);
    // Signed or not, all the rest is the same.
    run(home.path(), &["compress", "model", "-o", "plain", "--sha256"], 0);
    let signature = home.path().join("bundle/unweight.json.minisig");
    let text = fs::read_to_string(&signature).unwrap();
    fs::remove_file(&signature).unwrap();
    same(&home.path().join("bundle"), &home.path().join("plain"));
    fs::write(&signature, &text).unwrap();

    let verify = |bundle: &str, key: &str, status: i32| run(home.path(), &["verify", bundle, "--key", key], status);
    let output = verify("bundle", "mine.pub", 0);
    assert!(stdout(&output).contains("sound, and signed with this key"), "{}", stdout(&output));
    let public = fs::read_to_string(home.path().join("mine.pub")).unwrap();
    verify("bundle", public.lines().nth(1).unwrap(), 0);
    let report = json(&run(home.path(), &["verify", "bundle", "--key", "mine.pub", "--quick", "--json"], 0));
    assert_eq!(report["signature"], "unweight.json");
    // Whom it does not concern is not concerned.
    assert!(json(&run(home.path(), &["verify", "bundle", "--json"], 0))["signature"].is_null());
    run(home.path(), &["decompress", "bundle", "-o", "restored"], 0);
    same(&home.path().join("model"), &home.path().join("restored"));
    let archive = run(home.path(), &["compress", "model", "-o", "-", "--sign", "mine.key"], 0).stdout;
    assert!(
        archive.windows(22).any(|window| window == b"\0unweight.json.minisig" || window == b"unweight.json.minisig\0")
    );

    let wrong = |bundle: &str, key: &str, why: &str| {
        let output = verify(bundle, key, 1);
        assert!(stdout(&output).contains(why), "{why}: {}", stdout(&output));
    };
    wrong("bundle", "theirs.pub", "another key");
    wrong("plain", "mine.pub", "missing");
    // Another bundle with this signature, and this one with another.
    fs::write(home.path().join("plain/unweight.json.minisig"), &text).unwrap();
    verify("plain", "mine.pub", 0);
    run(home.path(), &["compress", "model", "-o", "plain", "--force", "--sha256", "--profile", "palette"], 0);
    fs::write(home.path().join("plain/unweight.json.minisig"), &text).unwrap();
    wrong("plain", "mine.pub", "not of this manifest");
    fs::write(&signature, "untrusted comment: x\n").unwrap();
    wrong("bundle", "mine.pub", "not a minisign signature");
    // A flipped bit of the weights is found as ever.
    fs::write(&signature, &text).unwrap();
    let shard = shards(&home.path().join("bundle"))[0].clone();
    let mut bytes = fs::read(&shard).unwrap();
    let at = bytes.len() / 2;
    bytes[at] ^= 1;
    fs::write(&shard, bytes).unwrap();
    wrong("bundle", "mine.pub", "expected");
    // A signature of digests that could be forged proves nothing.
    copy(&fixture().join("bundle"), &home.path().join("weak"));
    let secret = fs::read_to_string(home.path().join("mine.key")).unwrap();
    let secret = minisign::SecretKeyBox::from_string(&secret).unwrap().into_unencrypted_secret_key().unwrap();
    let manifest = fs::read(home.path().join("weak/unweight.json")).unwrap();
    let by_hand = minisign::sign(None, &secret, &manifest[..], None, None).unwrap().to_string();
    fs::write(home.path().join("weak/unweight.json.minisig"), by_hand).unwrap();
    wrong("weak", "mine.pub", "no SHA-256");

    let mistakes: [(&[&str], &str); 4] = [
        (&["compress", "model", "-o", "out", "--sign", "nothing.key"], "nothing.key"),
        (&["compress", "model", "-o", "out", "--sign", "mine.pub"], "a secret key of minisign"),
        (&["compress", "model", "-o", "out", "--sign", "mine.key", "--password-file", "mine.pub"], "mine.key"),
        (&["verify", "bundle", "--key", "nonsense"], "not a minisign public key"),
    ];
    for (arguments, why) in mistakes {
        let output = run(home.path(), arguments, 2);
        assert!(stderr(&output).contains(why), "{arguments:?}: {}", stderr(&output));
        assert!(!home.path().join("out").exists());
    }
    fs::write(home.path().join("model/unweight.json.minisig"), "mine").unwrap();
    assert!(stderr(&run(home.path(), &["compress", "model", "-o", "out"], 2)).contains("reserved"));
}
