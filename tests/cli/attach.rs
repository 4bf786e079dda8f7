//! `kernels attach` and `detach`: compiled kernels in a bundle.

use std::{collections::BTreeSet, fs, sync::Arc, time::Duration};

use unweight::{
    codegen::spec::{Arch, GemmMmaSpec, Op, VariantSpec, catalog},
    engine::{Engine, EngineOptions},
    format::{
        bundle::Bundle,
        testing::demo_model::{self},
    },
    rt::{
        Error, LoadOptions,
        cache::CacheState,
        env::{Env, JitMode},
        raw::{
            choose::{cost::gpu_model::GpuModel, policy::PackedChooser},
            jit::{
                cache::{CachePolicy, KernelCache},
                compiler::{CompileRequest, NvrtcCompiler},
            },
            layer::loader::reachable,
        },
    },
};

use crate::harness::{
    attach_plan, documented, error_code, json, needs_nvrtc, run, same, shared_cache, stderr, stdout, tiny, unweight,
};

/// Missing kernels are reported without a compiler.
#[test]
fn lists_missing_kernels_of_stored_mlps() {
    let home = tempfile::tempdir().unwrap();
    demo_model::write(&home.path().join("model"), &tiny()).unwrap();
    run(home.path(), &["compress", "model", "-o", "bundle", "--profile", "inference"], 0);
    let missing = |more: &[&str]| {
        let attach = [&["kernels", "attach", "bundle", "--arch", "sm_90a", "--json"], more].concat();
        let output = unweight(&attach)
            .current_dir(&home)
            .env("UNWEIGHT_CACHE_DIR", home.path().join("empty"))
            .env("UNWEIGHT_NVRTC", home.path().join("nowhere.so"))
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
        assert!(stderr(&output).lines().count() < 15, "{}", stderr(&output));
        json(&output)["error"]["message"].as_str().unwrap().to_owned()
    };
    let linears = missing(&[]);
    assert!(linears.contains("uw_sm90a_gemm_") && !linears.contains("_gemm_recon_"), "{linears}");
    let stored = missing(&["--placement", "stored"]);
    // Palettes of odd layers, exponents of even layers, the decoders for both, and the sums of down_proj.
    for name in [
        "_gemm_recon_palette_n1p6s2_",
        "_gemm_recon_exponent_n1p6_",
        "_decode_huffman_full_",
        "_decode_huffman_exponent_",
        "_store_add",
    ] {
        assert!(stored.contains(name), "no {name} in {stored}");
    }
    // The kernels of both KV caches, or of one.
    let (packed, bf16) = (missing(&["--kv-cache", "packed"]), missing(&["--kv-cache", "bf16"]));
    for name in ["_kv_pack_step_", "_kv_pack_chunk_", "_kv_pack_release_", "_kv_unpack_", "c1_packed_pdl"] {
        assert!(packed.contains(name) && linears.contains(name) && !bf16.contains(name), "{name} in {bf16}");
    }
    assert!(bf16.lines().count() < linears.lines().count() && bf16.contains("_attention_decode_"), "{bf16}");
    let alternate = missing(&["--placement", "alternate"]);
    assert!(alternate.contains("_decode_huffman_palette_"), "{alternate}");

    // An attached plan does not change the result.
    attach_plan(&home.path().join("bundle"), "{\"version\": 1}");
    assert_eq!(missing(&["--placement", "stored"]), stored);
    assert_eq!(json(&run(home.path(), &["inspect", "bundle", "--json"], 0))["attached_plan"], true);
    assert!(stdout(&run(home.path(), &["inspect", "bundle"], 0)).ends_with("a plan of `tune` is attached\n"));
    let detached = stdout(&run(home.path(), &["kernels", "detach", "bundle"], 0));
    assert!(detached.contains("removed with the plan of `tune`"), "{detached}");
    assert_eq!(json(&run(home.path(), &["inspect", "bundle", "--json"], 0))["attached_plan"], false);
}

#[test]
fn bundle_carries_its_kernels() {
    needs_nvrtc();
    let home = tempfile::tempdir().unwrap();
    demo_model::write(&home.path().join("model"), &tiny()).unwrap();
    run(home.path(), &["compress", "model", "-o", "bundle", "--profile", "packed"], 0);
    let in_home = |arguments: &[&str], status: i32| {
        let output = unweight(arguments).current_dir(&home).env("UNWEIGHT_CACHE_DIR", shared_cache()).output().unwrap();
        assert_eq!(output.status.code(), Some(status), "{arguments:?} {}", stderr(&output));
        output
    };
    let attach = ["kernels", "attach", "bundle", "--max-batch", "8", "--json"];
    let attached = json(&in_home(&attach, 0));
    documented("kernels attach", &attached);
    let count = attached["kernels"].as_array().unwrap().len();
    let refused = in_home(&attach[..3], 2);
    assert_eq!(error_code(&refused), "output-exists");
    let again = json(&in_home(&[&attach[..], &["--force"]].concat(), 0));
    assert!(again["kernels"].as_array().unwrap().iter().all(|kernel| kernel["state"] == "hit"), "{again}");
    assert_eq!(again["bytes"], attached["bytes"]);
    // An architecture by name needs every shape that ships, because the GPU decides which it needs. Missing kernels are
    // reported without a compiler.
    let every = unweight(&["kernels", "attach", "bundle", "--arch", "sm_89", "--max-batch", "8", "--force", "--json"])
        .current_dir(&home)
        .env("UNWEIGHT_CACHE_DIR", home.path().join("empty"))
        .env("UNWEIGHT_NVRTC", home.path().join("nowhere.so"))
        .output()
        .unwrap();
    assert_eq!(every.status.code(), Some(2), "{}", stderr(&every));
    let asked = |spec: &VariantSpec| matches!(spec.op, Op::GemmMma(op) if op.escapes && !op.dump);
    for spec in catalog::on::<GemmMmaSpec>(Arch::Sm89).filter(asked) {
        // JSON has all lines of the error, text only the first ten.
        let told = stdout(&every) + &stderr(&every);
        assert!(told.contains(&spec.to_string()), "no {spec} in {told}");
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

    // The kernels that loading and running this bundle needs, on a machine without NVRTC.
    let bundle = Bundle::open(&home.path().join("bundle")).unwrap();
    let mut specs = reachable(&bundle, LoadOptions::default().max_batch(8), PackedChooser::h200());
    specs.extend(Engine::kernels(&bundle, &EngineOptions::default(), &[GpuModel::H200]).unwrap());
    let requests: Vec<_> = specs.iter().map(|spec| CompileRequest::render(spec).unwrap()).collect();
    assert!(requests.len() > 20, "{}", requests.len());
    let mut env = Env::process().unwrap().clone();
    env.nvrtc = Some(home.path().join("nowhere.so"));
    let bare = |name: &str| {
        let policy = CachePolicy { mode: JitMode::Auto, lock_timeout: Duration::from_secs(1) };
        KernelCache::new(policy, Some(&home.path().join(name)), Arc::new(NvrtcCompiler::new(&env)))
    };
    let trusting = bare("trusting").trust(bundle.attached().unwrap().unwrap());
    let artifacts = trusting.compile_all(&requests, 2, &|_| {}).unwrap();
    for (request, artifact) in requests.iter().zip(&artifacts) {
        assert_eq!((&artifact.name, &artifact.state), (&request.name, &CacheState::Attached));
    }
    // The attached kernels equal the compiled ones, although only their bytes are known.
    let policy = CachePolicy { mode: JitMode::CacheOnly, lock_timeout: Duration::from_secs(1) };
    let own = KernelCache::new(policy, Some(&shared_cache()), Arc::new(NvrtcCompiler::new(&env)));
    for (own, artifact) in own.compile_all(&requests, 2, &|_| {}).unwrap().iter().zip(&artifacts) {
        assert_eq!(own.cubin, artifact.cubin);
        assert_eq!((&own.resources, &own.compiler), (&artifact.resources, &artifact.compiler));
    }
    let different: BTreeSet<_> = requests.iter().map(|request| &request.name).collect();
    let error = bare("careful").compile_all(&requests, 2, &|_| {}).unwrap_err();
    let Error::NotCached { missing, .. } = &error else { panic!("{error}") };
    assert_eq!(missing.len(), different.len(), "untrusted attached kernels were used");

    // Commands that run the bundle print a note about attached kernels once.
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
    assert_eq!(damaged["problems"][0]["code"], "attached-invalid");
    assert!(
        stderr(&in_home(&["verify", "bundle"], 1)).contains("`unweight kernels detach` removes the attached kernels")
    );
    // Commands that replace a damaged file report that its plan is lost.
    in_home(&["kernels", "detach", "bundle"], 0);
    attach_plan(&home.path().join("bundle"), "{\"version\": 1}");
    in_home(&attach, 0);
    let bytes = fs::read(&path).unwrap();
    let left = home.path().join("bundle/unweight.kernels.partial");
    fs::write(&left, "half").unwrap();
    let text = stderr(&in_home(&["verify", "bundle"], 1));
    assert!(text.contains("move the extra files named above"), "{text}");
    fs::remove_file(&left).unwrap();
    for (kept, plan) in [(bytes.len() - 1, "the plan of `tune` was undamaged and is kept"), (100, "is lost")] {
        fs::write(&path, &bytes[..kept]).unwrap();
        let said = stderr(&in_home(&[&attach[..], &["--force"]].concat(), 0));
        assert!(
            said.contains("the damaged attached kernels are replaced (unweight.kernels: ") && said.contains(plan),
            "{said}"
        );
        let stays = json(&in_home(&["inspect", "bundle", "--json"], 0));
        assert_eq!(stays["attached_plan"], plan.ends_with("kept"));
    }
    fs::write(&path, "unweight.kernels").unwrap();
    assert!(stderr(&in_home(&trusted, 2)).contains("not used: unweight.kernels: truncated at byte 16"));
    assert!(stderr(&in_home(&["inspect", "bundle"], 0)).contains("unweight.kernels: truncated at byte 16"));
    let detached = json(&in_home(&["kernels", "detach", "bundle", "--json"], 0));
    documented("kernels detach", &detached);
    assert_eq!((&detached["detached"], &detached["bytes"]), (&true.into(), &16.into()));
    assert_eq!(json(&in_home(&["kernels", "detach", "bundle", "--json"], 0))["detached"], false);
    assert_eq!(json(&in_home(&["verify", "bundle", "--json"], 0))["attached_kernels"], 0);
    assert!(stderr(&in_home(&trusted, 2)).contains("the bundle has no attached kernels"));
}
