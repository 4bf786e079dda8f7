//! `convert`, and DFloat11 sources.

use std::{fs, path::Path};

use crate::harness::{copy, documented, fails, json, one_matrix, run, same, stderr, stdout};

/// Files that the dfloat11 package wrote are accepted as a source and reproduced.
#[test]
fn dfloat11_round_trip() {
    let home = tempfile::tempdir().unwrap();
    let stock = Path::new(env!("CARGO_MANIFEST_DIR")).join("unweight-rivals/tests/fixtures/dfloat11/model");
    copy(&stock, &home.path().join("df11"));
    let report = json(&run(home.path(), &["convert", "df11", "-o", "plain", "--to", "bf16", "--json"], 0));
    documented("convert --to bf16", &report);
    assert_eq!((&report["units"], &report["weights"]), (&4.into(), &16.into()));
    let output = run(home.path(), &["compress", "df11", "-o", "bundle", "--profile", "packed"], 0);
    assert!(stderr(&output).contains("a DFloat11 model: 16 weights of 4 units"), "{}", stderr(&output));
    run(home.path(), &["decompress", "bundle", "-o", "restored"], 0);
    same(&home.path().join("plain"), &home.path().join("restored"));
    let refused = fails(home.path(), &["verify", "bundle", "--against", "df11"], 2, "usage");
    assert!(refused.contains("--against takes no DFloat11 directory"), "{refused}");
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

    fs::create_dir(home.path().join("head")).unwrap();
    one_matrix(&home.path().join("head/model.safetensors"), "lm_head.weight");
    fs::write(home.path().join("head/config.json"), r#"{"hidden_size": 64, "vocab_size": 64}"#).unwrap();
    for (from, to, format, expected) in [
        ("head", "unit", "dfloat11", "unit: 1 weight in 1 unit, "),
        ("unit", "back", "bf16", "back: 1 weight of 1 unit, "),
    ] {
        let summary = stdout(&run(home.path(), &["convert", from, "-o", to, "--to", format], 0));
        assert!(summary.contains(expected), "{summary}");
    }

    // `convert` cannot replace an output, so the error does not suggest --force.
    let text = fails(home.path(), &["convert", "plain", "-o", "third", "--to", "dfloat11"], 2, "output-exists");
    assert!(text.ends_with("\n  help: choose another name\n"), "{text}");
    fails(home.path(), &["convert", "df11", "-o", "x", "--to", "dfloat11"], 2, "nothing-to-convert");
    fails(home.path(), &["convert", "plain", "-o", "x", "--to", "bf16"], 2, "dfloat11-config-invalid");
    // Without a valid configuration the files are byte tensors, and the command says so.
    copy(&stock, &home.path().join("cut"));
    let config = fs::read(stock.join("config.json")).unwrap();
    fs::write(home.path().join("cut/config.json"), &config[..config.len() - 2]).unwrap();
    for arguments in
        [&["compress", "cut", "-o", "x"][..], &["plan", "cut"], &["convert", "cut", "-o", "x", "--to", "bf16"]]
    {
        let text = fails(home.path(), arguments, 2, "dfloat11-config-invalid");
        assert!(text.contains(&format!("cut/config.json: byte {}: ", config.len() - 2)), "{text}");
        assert!(!home.path().join("x").exists() && !home.path().join("x.partial").exists());
    }
    run(home.path(), &["compress", "cut/lm_head.safetensors", "-o", "x"], 0);
    fs::remove_dir_all(home.path().join("x")).unwrap();
    // A flipped bit that shifts the codes after it is reported as invalid data.
    let file = home.path().join("df11/lm_head.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    bytes[1501] ^= 1;
    fs::write(&file, bytes).unwrap();
    for arguments in [&["convert", "df11", "-o", "x", "--to", "bf16"][..], &["compress", "df11", "-o", "x"]] {
        let text = fails(home.path(), arguments, 1, "dfloat11-unit-damaged");
        assert!(text.contains("lm_head.safetensors: unit 'lm_head' at byte"), "{text}");
        assert!(!home.path().join("x").exists());
    }
}
