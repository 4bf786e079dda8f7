//! `cargo xtask dist` makes the same bytes in two directories.

use std::{collections::BTreeMap, env, fs, io::Read, path::Path, process::Command};

mod workspace;

use workspace::root;

fn run(command: &mut Command) {
    let status = command.status().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(status.success(), "{command:?}: {status}");
}

/// Returns the targets of a release for which its compiler has a standard library.
fn targets() -> Vec<String> {
    let other = if cfg!(target_arch = "aarch64") { "x86_64" } else { "aarch64" };
    let own = env::consts::ARCH;
    let all = [(own, "gnu"), (own, "musl"), (other, "musl")].map(|(cpu, libc)| format!("{cpu}-unknown-linux-{libc}"));
    let has = |target: &String| {
        let mut command = Command::new("rustc");
        command.env("RUSTUP_TOOLCHAIN", "1.95.0").args(["--print", "target-libdir", "--target", target]);
        let output = command.output().expect("rustc runs");
        let found = Path::new(String::from_utf8_lossy(&output.stdout).trim()).is_dir();
        if !found {
            println!("left out: {target} (rustup target add {target} --toolchain 1.95.0)");
        }
        found
    };
    // The last one needs the one before.
    all.into_iter().take_while(has).collect()
}

/// Builds the files in a clone of the repository. `.ci/release` and other scripts look for them in `artifacts`.
fn dist(clone: &Path, artifacts: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut command = Command::new("cargo");
    command.current_dir(clone).args(["xtask", "dist", "--out"]).arg(artifacts);
    for target in targets() {
        command.args(["--target", &target]);
    }
    // Each clone must build everything itself, including what cargo would share.
    run(command.env_remove("CARGO_TARGET_DIR").env_remove("CARGO_MANIFEST_DIR"));
    let entries = fs::read_dir(artifacts).expect("the files");
    let files = entries.map(|entry| entry.expect("a file").path());
    files.map(|path| (path.file_name().unwrap().to_string_lossy().into_owned(), fs::read(path).unwrap())).collect()
}

#[test]
#[ignore = "two release builds, half an hour: .ci/nightly"]
fn two_folders_give_equal_bytes() {
    let target = root().join("target");
    let [one, other] = ["dist-clone", "second/directory/of-another-length"].map(|name| {
        let clone = target.join(name);
        // Keep the clone's target directory, so that unchanged code is not rebuilt.
        if !clone.join(".git").exists() {
            run(Command::new("git").args(["clone", "--quiet"]).arg(root()).arg(&clone));
        }
        run(Command::new("git").current_dir(&clone).args(["fetch", "--quiet", "--tags", "origin", "HEAD"]));
        run(Command::new("git").current_dir(&clone).args(["checkout", "--quiet", "--detach", "FETCH_HEAD"]));
        dist(&clone, &target.join("artifacts").with_extension(if name == "dist-clone" { "" } else { "other" }))
    });
    let names = |files: &BTreeMap<String, Vec<u8>>| files.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(&one), names(&other));
    assert!(one.len() >= 7 && one.contains_key("SHA256SUMS"), "{:?}", names(&one));
    for target in targets() {
        let archive = one.iter().find(|(name, _)| name.ends_with(&format!("{target}.tar.gz")));
        let (_, archive) = archive.unwrap_or_else(|| panic!("{target}: {:?}", names(&one)));
        let mut text = Vec::new();
        flate2::read::GzDecoder::new(archive.as_slice()).read_to_end(&mut text).expect("a sound archive");
        // Zig's, of a pinned version; other linkers are the host's.
        let linker = b"Linker: LLD ";
        assert!(text.windows(linker.len()).any(|window| window == linker), "{target}: linked by the host's linker");
    }
    let source_folder = root().to_str().expect("the path is UTF-8").as_bytes();
    for (name, bytes) in &one {
        assert!(*bytes == other[name], "{name} differs");
        assert!(
            !bytes.windows(source_folder.len()).any(|window| window == source_folder),
            "{name} contains the source directory"
        );
    }
}
