//! Tests `.ci/publish` with programs in the place of cargo, curl, pip and sleep, and a directory in that of the
//! registries. Also tests what `.ci/release` refuses.

use std::{
    env, fs,
    os::unix::fs::PermissionsExt,
    path::PathBuf,
    process::{Command, Output},
    sync::Mutex,
};

mod workspace;

use workspace::root;

/// Packs three crates; publishes them in their order, at most as many as the file `limit` says.
const CARGO: &str = r#"#!/bin/bash
task=$1
shift
case $task in
    package) mkdir -p target/package; for name in aa-one aa-two aa-three; do echo "$name" > target/package/$name-0.1.0.crate; done ;;
    publish)
        echo "$*" >> log
        limit=$(cat limit)
        for name in aa-one aa-two aa-three; do
            case " $* " in *" --package $name "*) ;; *) continue ;; esac
            [ "$limit" -gt 0 ] || exit 101
            limit=$((limit - 1))
            cp target/package/$name-0.1.0.crate registry/
        done ;;
esac
"#;
const CURL: &str = r#"#!/bin/bash
while [ $# -gt 1 ]; do [ "$1" != --output ] || out=$2; shift; done
name=${1##*/}
name=${name%-0.1.0.crate}
[ ! -e broken ] || { echo 500; exit; }
[ -e registry/$name-0.1.0.crate ] || { echo 404; exit; }
case $1 in
    *index.crates.io/aa/-*/"$name") echo "{\"vers\":\"0.1.0\",\"cksum\":\"$(sha256sum < registry/$name-0.1.0.crate | cut -d ' ' -f 1)\"}" ;;
    *static.crates.io*) cat registry/$name-0.1.0.crate ;;
esac > "$out"
echo 200
"#;
const PYTHON: &str =
    "#!/bin/bash\n[ -e registry/a.whl ] || exit 1\nmkdir -p target/published\ncp registry/a.whl target/published\n";
/// What was awaited appears during the second wait.
const SLEEP: &str = "#!/bin/bash\necho sleep $1 >> log\n[ ! -e awaited ] || [ $(grep -c sleep log) -lt 2 ] || cp awaited registry/a.whl\n";

/// A repository with the script, and the programs it calls.
struct Repository(PathBuf);

impl Repository {
    fn new(limit: u32) -> Self {
        static CREATED: Mutex<u32> = Mutex::new(0);
        let mut created = CREATED.lock().unwrap();
        *created += 1;
        let home = env::temp_dir().join(format!("unweight-publish-{}-{created}", std::process::id()));
        for folder in ["bin", ".ci", "registry"] {
            fs::create_dir_all(home.join(folder)).unwrap();
        }
        fs::copy(root().join(".ci/publish"), home.join(".ci/publish")).unwrap();
        let repository = Self(home);
        repository.put("Cargo.toml", "[workspace.package]\nversion = \"0.1.0\"\n");
        repository.put("limit", &limit.to_string());
        for (name, text) in [("cargo", CARGO), ("curl", CURL), ("python3", PYTHON), ("sleep", SLEEP)] {
            repository.put(&format!("bin/{name}"), text);
            fs::set_permissions(repository.0.join("bin").join(name), fs::Permissions::from_mode(0o755)).unwrap();
        }
        repository
    }

    fn put(&self, name: &str, text: &str) {
        fs::write(self.0.join(name), text).unwrap();
    }

    fn run(&self, arguments: &[&str]) -> (bool, String) {
        let path = env::join_paths(
            [self.0.join("bin")].into_iter().chain(env::split_paths(&env::var_os("PATH").expect("PATH is set"))),
        );
        let mut command = Command::new(self.0.join(".ci/publish"));
        let Output { status, stdout, stderr } =
            command.args(arguments).env("PATH", path.unwrap()).output().expect("bash runs");
        (status.success(), [stdout, stderr].map(|text| String::from_utf8(text).unwrap()).concat())
    }

    fn log(&self) -> String {
        fs::read_to_string(self.0.join("log")).unwrap_or_default()
    }
}

impl Drop for Repository {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn publication_continues_after_a_failure() {
    let repository = Repository::new(1);
    let (success, text) = repository.run(&["crates"]);
    assert!(!success && text.contains("run this again"), "{text}");
    repository.put("limit", "9");
    let (success, text) = repository.run(&["crates"]);
    assert!(success, "{text}");
    let (success, text) = repository.run(&["crates"]);
    assert!(success && text.contains("has all crates of 0.1.0"), "{text}");
    // In the order of file names; the crate that is there is left out, and the last run publishes nothing.
    let all = "--locked --no-verify --package aa-one --package aa-three --package aa-two\n";
    assert_eq!(repository.log(), format!("{all}--locked --no-verify --package aa-three --package aa-two\n"));
}

#[test]
fn new_crates_are_published_at_the_pace_of_the_registry() {
    let repository = Repository::new(1);
    let (success, text) = repository.run(&["crates", "--paced"]);
    assert!(success, "{text}");
    assert_eq!(repository.log().matches("sleep 660").count(), 2, "{}", repository.log());
    // Without progress it ends.
    let repository = Repository::new(0);
    let (success, text) = repository.run(&["crates", "--paced"]);
    assert!(!success && text.contains("no crate was published"), "{text}");
}

#[test]
fn other_bytes_and_a_broken_registry_are_no_reason_to_publish() {
    let repository = Repository::new(9);
    repository.put("registry/aa-two-0.1.0.crate", "of another commit");
    let (success, text) = repository.run(&["crates"]);
    assert!(!success && text.contains("other bytes of aa-two 0.1.0"), "{text}");
    let repository = Repository::new(9);
    repository.put("broken", "");
    let (success, text) = repository.run(&["crates"]);
    assert!(!success && text.contains(": 500; run this again"), "{text}");
    assert_eq!(repository.log(), "");
}

/// install.sh takes the latest release.
#[test]
fn prereleases_and_backports_are_not_the_latest_release() {
    let repository = Repository::new(0);
    for (version, tags, is_latest) in [
        ("0.1.0", "", true),
        ("0.10.0", "v0.9.0\nv0.1.0", true),
        ("0.9.1", "v0.9.0\nv0.10.0", false),
        ("0.10.0", "v0.10.0\nv0.9.0", true),
        ("0.2.0-rc.1", "v0.1.0", false),
    ] {
        repository.put("Cargo.toml", &format!("[workspace.package]\nversion = \"{version}\"\n"));
        repository.put("tags", tags);
        let mut command = Command::new(repository.0.join(".ci/publish"));
        let tags = fs::File::open(repository.0.join("tags")).unwrap();
        let output = command.arg("latest").stdin(tags).output().expect("bash runs");
        assert_eq!(String::from_utf8(output.stdout).unwrap(), format!("{is_latest}\n"), "{version}");
    }
}

#[test]
fn the_page_of_a_release_says_how_to_install_and_verify() {
    let repository = Repository::new(0);
    let put = |changelog: &str| {
        repository.put("CHANGELOG.md", changelog);
        repository.run(&["notes", "https://example.org/a/b"])
    };
    fs::create_dir(repository.0.join(".github")).unwrap();
    fs::copy(root().join(".github/release-notes.txt"), repository.0.join(".github/release-notes.txt")).unwrap();
    let links = "[a](docs/guide/run.md#models), [b](https://other.example/c.md)";
    let changelog =
        format!("# Changelog\n\n## [0.2.0] - x\nnewer\n## [0.1.0] - y\n\n{links}\n\n## [0.0.9] - z\nolder\n");
    let (success, text) = put(&changelog);
    assert!(!success && text.contains("minisign.pub does not exist"), "{text}");
    repository.put("minisign.pub", "");
    let (success, text) = put("# Changelog\n## [0.1.0-rc.1] - x\nother\n");
    assert!(!success && text.contains("no section for 0.1.0"), "{text}");
    let (success, text) = put(&changelog);
    assert!(
        success && !["newer", "older", "##  [", "@URL@", "@VERSION@"].iter().any(|part| text.contains(part)),
        "{text}"
    );
    for part in [
        "curl -fsSL https://example.org/a/b/releases/download/v0.1.0/install.sh | sh -s -- --version 0.1.0\n",
        "--uninstall",
        "(https://example.org/a/b/blob/v0.1.0/minisign.pub)",
        "minisign -V -p minisign.pub -m SHA256SUMS",
        "sha256sum --check --ignore-missing SHA256SUMS",
        "https://example.org/a/b/.github/workflows/release.yml@refs/tags/v0.1.0 FILE",
        "[a](https://example.org/a/b/blob/v0.1.0/docs/guide/run.md#models), [b](https://other.example/c.md)\n",
    ] {
        assert!(text.contains(part), "no '{part}': {text}");
    }
}

#[test]
fn a_release_is_tested_where_it_is_built() {
    let output = Command::new(root().join(".ci/release")).args(["--out", "elsewhere"]).output().expect("bash runs");
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(2) && text.contains("what is tested is target/artifacts"), "{text}");
}

/// `git add --all` in a clone with the key would publish it.
#[test]
fn the_secret_key_of_releases_is_never_committed() {
    let mut command = Command::new("git");
    command.current_dir(root()).args(["check-ignore", "--quiet", "--no-index", "minisign.key"]);
    assert!(command.status().expect("git runs").success(), ".gitignore does not have minisign.key");
}

#[test]
fn registries_get_time_to_serve_the_files() {
    let repository = Repository::new(9);
    repository.put("a.whl", "wheel");
    assert!(repository.run(&["crates"]).0);
    let (success, text) = repository.run(&["compare", "a.whl"]);
    assert!(
        !success && text.contains("after 10 minutes") && repository.log().matches("sleep 30").count() == 20,
        "{text}"
    );
    repository.put("log", "");
    repository.put("awaited", "wheel");
    let (success, text) = repository.run(&["compare", "a.whl"]);
    assert!(success && repository.log().matches("sleep 30").count() == 2, "{text}");
    repository.put("registry/aa-one-0.1.0.crate", "changed");
    let (success, text) = repository.run(&["compare", "a.whl"]);
    assert!(!success && text.contains("other bytes of aa-one"), "{text}");
    repository.put("registry/a.whl", "changed");
    let (success, text) = repository.run(&["compare", "a.whl"]);
    assert!(!success && text.contains("other bytes than a.whl"), "{text}");
}
