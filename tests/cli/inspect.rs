//! `inspect`: tables, CSV and plots.

use std::fs;

use crate::harness::{copy, fails, fixture, json, one_matrix, run, stdout};

#[test]
fn lists_tensors_and_draws_plots() {
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
    let text = fails(home.path(), &["inspect", bundle, "--tensor", "nothing*"], 2, "tensor-not-found");
    assert!(text.contains("nothing*"), "{text}");
    // Without a file, the plot goes to the terminal.
    let bars = stdout(&run(home.path(), &["inspect", bundle, "--plot", "ratio"], 0));
    assert!(bars.contains("embedding") && bars.contains('\u{2588}') && bars.contains("tensors: "), "{bars}");
    let bars = stdout(&run(home.path(), &["inspect", bundle, "--plot", "exponents"], 0));
    // The histogram shows the exponents of weights and no distant values.
    assert!(bars.contains("bits of information") && bars.contains("\n120 ") && !bars.contains("\n  3 "), "{bars}");
    assert!(bars.lines().count() < 40, "{bars}");
    run(home.path(), &["inspect", bundle, "--svg", "x.svg"], 2);
}

#[test]
fn counts_exponents_in_every_profile() {
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
    assert_eq!(counts("packed"), expected);
    assert_eq!(counts("compact"), expected);
}

#[test]
fn svg_replaces_only_drawings() {
    let home = tempfile::tempdir().unwrap();
    copy(&fixture().join("model"), &home.path().join("model"));
    run(home.path(), &["compress", "model", "-o", "bundle"], 0);
    let shard = "bundle/model-00001-of-00002.safetensors";
    let before = fs::read(home.path().join(shard)).unwrap();
    fails(home.path(), &["inspect", "bundle", "--plot", "ratio", "--svg", shard], 2, "output-not-replaceable");
    assert!(fs::read(home.path().join(shard)).unwrap() == before);
    // A shard whose tensor name looks like SVG, and a link to a plot.
    fs::create_dir(home.path().join("odd")).unwrap();
    one_matrix(&home.path().join("odd/m.safetensors"), "<svg");
    let before = fs::read(home.path().join("odd/m.safetensors")).unwrap();
    fs::write(home.path().join("elsewhere.svg"), "<svg/>").unwrap();
    std::os::unix::fs::symlink("elsewhere.svg", home.path().join("link.svg")).unwrap();
    for name in ["odd/m.safetensors", "link.svg", "bundle"] {
        fails(home.path(), &["inspect", "bundle", "--plot", "ratio", "--svg", name], 2, "output-not-replaceable");
    }
    assert!(fs::read(home.path().join("odd/m.safetensors")).unwrap() == before);
    assert_eq!(fs::read(home.path().join("elsewhere.svg")).unwrap(), b"<svg/>");
    for _ in 0..2 {
        run(home.path(), &["inspect", "bundle", "--plot", "ratio", "--svg", "x.svg"], 0);
    }
}

/// A shape whose product overflows, but that has no elements.
#[test]
fn shows_a_shape_without_elements() {
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
    // Without elements there is nothing to plot.
    fails(home.path(), &["inspect", "bundle", "--plot", "ratio"], 2, "nothing-to-draw");
}
