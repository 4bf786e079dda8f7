//! `completions`: the words that a shell completes.

use std::{fs, path::Path, process::Command};

use crate::harness::{fixture, one_matrix, run, stderr, stdout};

/// Requests completions as bash does when the tab key is pressed at the end of the line.
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
    // A shell trims blanks at both ends.
    stdout(&output).lines().map(|line| line.trim().to_owned()).collect()
}

#[test]
fn complete_commands_kernels_and_tensors() {
    let home = fixture();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        assert!(stdout(&run(home, &["completions", shell], 0)).contains("_UNWEIGHT_COMPLETE"), "{shell}");
    }
    assert_eq!(completions(home, &["unweight", "decom"]), ["decompress"]);
    assert_eq!(completions(home, &["unweight", "compress", "--profile", "pac"]), ["packed"]);
    let kernels = completions(home, &["unweight", "kernels", "emit", "uw_sm90a_encode_huffman_st"]);
    assert_eq!(kernels, ["uw_sm90a_encode_huffman_stats"]);
    // The architecture comes from the word or from the line.
    let of_word = completions(home, &["unweight", "kernels", "emit", "uw_sm89_encode_huffman_st"]);
    assert_eq!(of_word, ["uw_sm89_encode_huffman_stats"]);
    let of_line = completions(home, &["unweight", "kernels", "compile", "--arch", "sm_120a", "uw_"]);
    assert!(!of_line.is_empty() && of_line.iter().all(|name| name.starts_with("uw_sm120a_")), "{of_line:?}");
    let gates = completions(home, &["unweight", "extract", "bundle", "--tensor", "model.layers.1.mlp.g"]);
    assert_eq!(gates, ["model.layers.1.mlp.gate_proj.weight"]);
    assert_eq!(completions(home, &["unweight", "inspect", "bundle", "--tensor", "model.no"]), ["model.norm.weight"]);
    let files = completions(home, &["unweight", "extract", "bundle", "--file", "model.safe"]);
    assert_eq!(files, ["model.safetensors.index.json"]);
    // Names with characters that a shell would execute or a terminal interpret are not offered, because anybody may
    // choose them.
    let other = tempfile::tempdir().unwrap();
    fs::create_dir(other.path().join("model")).unwrap();
    for (file, name) in
        [("a", "z.$(touch${IFS}pwned)"), ("b", "z.\x1b]0;x\x07"), ("c", "z.`id`"), ("d", "z.;id"), ("e", "z.harmless")]
    {
        one_matrix(&other.path().join(format!("model/{file}.safetensors")), name);
    }
    run(other.path(), &["compress", "model", "-o", "bundle"], 0);
    assert_eq!(completions(other.path(), &["unweight", "extract", "bundle", "--tensor", "z."]), ["z.harmless"]);
    // Without a bundle on the line there are no candidates, and no error.
    assert_eq!(completions(home, &["unweight", "extract", "--tensor", "model."]).concat(), "");
}
