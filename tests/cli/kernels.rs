//! `kernels list`, `emit` and `compile`, and the cache of compiled kernels.

use std::{
    fs,
    path::Path,
    process::{Command, Output},
};

use unweight::format::testing::demo_model::{self};

use crate::harness::{
    documented, error_code, fails, json, needs_nvrtc, run, shared_cache, stderr, stdout, tiny, unweight,
};

#[test]
fn lists_and_emits_sources() {
    let home = tempfile::tempdir().unwrap();
    let report = json(&run(home.path(), &["kernels", "list", "--json"], 0));
    let kernels = report["kernels"].as_array().unwrap();
    assert!(kernels.len() > 30);
    let name = kernels[0]["name"].as_str().unwrap();
    let source = stdout(&run(home.path(), &["kernels", "emit", name], 0));
    assert!(source.contains(name) && source.contains("__global__"), "{source}");
    run(home.path(), &["kernels", "emit", "uw_sm90a_encode_huffman_*", "-o", "out"], 0);
    assert!(home.path().join("out/uw_sm90a_encode_huffman_stats.cu").is_file());
    assert!(home.path().join("out/uw_sm90a_encode_huffman_stats.plan.txt").is_file());
    assert!(home.path().join("out/include/unweight").is_dir());
    fails(home.path(), &["kernels", "emit"], 2, "usage");
    fails(home.path(), &["kernels", "list", "uw_sm90a_nothing"], 2, "kernel-name-invalid");
    fails(home.path(), &["kernels", "list", "nothing*"], 2, "kernel-not-found");
    // A pattern for another architecture than `--arch`.
    let text = fails(home.path(), &["kernels", "list", "uw_sm89_*", "--arch", "sm_86"], 2, "kernel-not-found");
    assert!(text.contains("`--arch sm_89`"), "{text}");
    assert!(
        stdout(&run(home.path(), &["kernels", "list", "uw_sm89_decode_huffman_*", "--arch", "sm_89"], 0))
            .contains("_full_l7")
    );
    // The default architecture is the GPU's; without a GPU the output says so.
    let output = run(home.path(), &["kernels", "list"], 0);
    match unweight_rt::Device::arch_of(0) {
        Ok(arch) => assert!(stdout(&output).contains(&format!("uw_{}_encode_huffman_stats", arch.tag()))),
        Err(_) => {
            assert!(stderr(&output).contains("no GPU found: using kernels for sm_90a; --arch"), "{}", stderr(&output))
        }
    }
    // The kernels that ship for another architecture, and those that it lacks.
    let ada = json(&run(home.path(), &["kernels", "list", "--arch", "sm_89", "--json"], 0));
    let names: Vec<_> = ada["kernels"].as_array().unwrap().iter().map(|k| k["name"].as_str().unwrap()).collect();
    assert!(names.len() > 30 && names.iter().all(|name| name.starts_with("uw_sm89_")), "{names:?}");
    assert!(names.contains(&"uw_sm89_gemm_mma_b8_r2w8p3c1_async_esc_store"), "{names:?}");
    let of_hopper = ["kernels", "emit", "uw_sm89_gemm_wgmma_b128_g2p6_esc_store"];
    fails(home.path(), &of_hopper, 2, "kernel-variant-infeasible");
    run(home.path(), &["kernels", "list", "--arch", "sm_75"], 2);
}

#[test]
fn compile_fills_the_cache_once() {
    needs_nvrtc();
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
    let compile = ["kernels", "compile", "uw_sm90a_encode_huffman_stats", "uw_sm90a_encode_huffman_table", "--json"];
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
    let folder = listed["entries"][0]["directory"].as_str().unwrap();
    let cubin = cache.join("entries").join(folder).join("kernel.cubin");
    let mut bytes = fs::read(&cubin).unwrap();
    bytes[1000] ^= 1;
    fs::write(&cubin, bytes).unwrap();
    let verified = json(&cached(&["cache", "verify", "--json"], 1));
    documented("cache verify", &verified);
    assert_eq!((&verified["good"], &verified["damaged"][0]["directory"]), (&1.into(), &folder.into()));
    cached(&["cache", "verify", "--evict"], 0);
    let pruned = json(&cached(&["cache", "prune", "--max", "1", "--json"], 0));
    documented("cache prune", &pruned);
    assert_eq!(pruned["entries"], 1);
    documented("cache clear", &json(&cached(&["cache", "clear", "--json"], 0)));
    let checked = json(&cached(&["kernels", "check", "uw_sm90a_encode_huffman_stats", "--json"], 0));
    documented("kernels check", &checked);
    assert_eq!(checked["kernels"][0]["problems"].as_array().unwrap().len(), 0);
}

#[test]
fn cache_must_be_a_directory() {
    let home = tempfile::tempdir().unwrap();
    fs::write(home.path().join("file"), "").unwrap();
    for (cache, status) in [("file", 2), ("missing", 0)] {
        for command in [["cache", "ls"], ["cache", "prune"], ["cache", "verify"]] {
            let output = unweight(&command).env("UNWEIGHT_CACHE_DIR", home.path().join(cache)).output().unwrap();
            assert_eq!(output.status.code(), Some(status), "{command:?} {cache}");
            assert_eq!(stderr(&output).contains("not a directory"), status == 2, "{}", stderr(&output));
        }
    }
    assert!(!home.path().join("missing").exists(), "looking creates nothing");
}

#[test]
fn compile_fails_if_the_cache_cannot_keep_them() {
    let home = tempfile::tempdir().unwrap();
    let compile = |limit: &str, nvrtc: Option<&Path>| {
        let script = format!("{limit} exec \"$0\" kernels compile uw_sm90a_encode_huffman_stats --json");
        let mut command = Command::new("bash");
        command.args(["-c", &script]).arg(assert_cmd::cargo::cargo_bin!("unweight"));
        command.env("UNWEIGHT_CACHE_DIR", home.path().join("cache")).env_remove("UNWEIGHT_JIT");
        nvrtc.map(|path| command.env("UNWEIGHT_NVRTC", path));
        command.output().unwrap()
    };
    // A limit of 1 KiB leaves no space for a cubin. The process must survive and fail.
    let output = compile("ulimit -f 1;", None);
    assert_eq!(output.status.code(), Some(2), "{:?} {}", output.status, stderr(&output));
    assert_eq!(error_code(&output), "kernels-not-kept");
    documented("kernels compile", &json(&output));
    assert!(json(&output)["kernels"][0]["not_kept"].is_string());
    let output = compile("", None);
    assert!(output.status.success() && json(&output)["kernels"][0]["not_kept"].is_null());
    // A FIFO as compiler is rejected instead of blocking.
    let fifo = home.path().join("libnvrtc.so.13");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    let output = compile("rm -rf \"$UNWEIGHT_CACHE_DIR\";", Some(&fifo));
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(error_code(&output), "kernels-not-cached");
    assert!(stderr(&output).contains("not a regular file"), "{}", stderr(&output));
}

#[test]
fn compile_bundle_compiles_what_loading_needs() {
    needs_nvrtc();
    let home = tempfile::tempdir().unwrap();
    demo_model::write(&home.path().join("model"), &tiny()).unwrap();
    run(home.path(), &["compress", "model", "-o", "bundle", "--profile", "packed"], 0);
    let cache = shared_cache();
    let compile = || {
        let arguments = ["kernels", "compile", "--bundle", "bundle", "--max-batch", "8", "--json"];
        let output = unweight(&arguments).current_dir(home.path()).env("UNWEIGHT_CACHE_DIR", &cache).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        output
    };
    let first = compile();
    let kernels = json(&first)["kernels"].as_array().unwrap().clone();
    let names: Vec<&str> = kernels.iter().map(|kernel| kernel["name"].as_str().unwrap()).collect();
    // The packer's kernels, and the products for merged gate and up and for tensors without escapes, at batches up to 8
    // only; and the kernels that a model runs besides its linears.
    for part in [
        "_pack_tiles",
        "_unpack",
        "encode_huffman_stats",
        "_silu_mul",
        "_store_add",
        "_esc_pdl_store",
        "_attention_decode_",
        "_sample_",
    ] {
        assert!(names.iter().any(|name| name.contains(part)), "no {part} in {names:?}");
    }
    assert!(
        names.iter().all(|name| !name.contains("_gemm_wgmma_") && !name.contains("sm90a_decode_huffman_")),
        "{names:?}"
    );
    assert!(stderr(&first).contains(&format!("{0}/{0}", names.len())), "a line per kernel");
    let second = json(&compile());
    assert!(second["kernels"].as_array().unwrap().iter().all(|kernel| kernel["state"] == "hit"), "{second}");
    run(home.path(), &["kernels", "compile", "--bundle", "bundle", "uw_sm90a_encode_huffman_stats"], 2);
    run(home.path(), &["kernels", "compile", "--max-batch", "8"], 2);
}
