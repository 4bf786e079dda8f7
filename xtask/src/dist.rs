//! `cargo xtask dist`: builds the files of a release. The bytes do not depend on the directory of the build.
//!
//! ```text
//! unweight-VERSION-TARGET.tar.zst, .tar.gz   the command, licences, manual pages, completions
//! unweight-VERSION-*.whl                     the Python package (targets with glibc)
//! *.cdx.json                                 CycloneDX SBOMs of both
//! unweight-VERSION.build.txt                 commit and tools
//! install.sh, Containerfile                  as in the repository
//! SHA256SUMS, SHA256SUMS.minisig             digests of all these, and their signature
//! ```

use std::{
    env,
    ffi::OsString,
    fs,
    io::{self, Write as _},
    path::{Path, PathBuf},
    process::Command,
};

use minisign::{SecretKey, SecretKeyBox};

use crate::{
    gpu_pack, notices,
    run::{self, cargo, git, read, root, run, target_dir},
    rustc, sbom, setup, wheel,
};

/// The version of the release.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");
/// The compiler of a release; another one makes other bytes.
const COMPILER: &str = "1.95.0";
/// The static target of the other architecture.
pub const OTHER_STATIC: &str =
    if cfg!(target_arch = "aarch64") { "x86_64-unknown-linux-musl" } else { "aarch64-unknown-linux-musl" };
/// Features for musl: CPU only, because a static program cannot load the driver.
pub const MUSL_FEATURES: &str = "cli,dfloat11,hub,plots,sign";

/// The file with the digests of the other files.
pub const SUMS: &str = "SHA256SUMS";
/// Files of the repository that a release has, too.
const SCRIPTS: [&str; 2] = ["Containerfile", "install.sh"];
/// The default output directory under `target`.
pub const OUT: &str = "artifacts";

/// The options of `cargo xtask dist`.
#[derive(Debug, PartialEq)]
struct Options {
    targets: Vec<String>,
    out: PathBuf,
    key: Option<PathBuf>,
    password_file: Option<PathBuf>,
    allows_dirty: bool,
}

impl Options {
    fn parse(arguments: &[String]) -> Result<Self, String> {
        let mut options =
            Self { targets: Vec::new(), out: target_dir(OUT), key: None, password_file: None, allows_dirty: false };
        let mut rest = arguments.iter();
        while let Some(argument) = rest.next() {
            let mut value = || rest.next().ok_or_else(|| format!("'{argument}' needs a value"));
            match argument.as_str() {
                "--target" => options.targets.push(value()?.clone()),
                "--out" => options.out = value()?.into(),
                "--sign" => options.key = Some(value()?.into()),
                "--password-file" => options.password_file = Some(value()?.into()),
                "--allow-dirty" => options.allows_dirty = true,
                other => return Err(format!("unexpected argument '{other}'; see `cargo xtask help`")),
            }
        }
        if options.password_file.is_some() && options.key.is_none() {
            return Err("--password-file needs --sign KEY".to_owned());
        }
        let [gnu, musl] = ["gnu", "musl"].map(|libc| format!("{}-unknown-linux-{libc}", env::consts::ARCH));
        let known = [gnu.as_str(), &musl, OTHER_STATIC];
        if let Some(other) = options.targets.iter().find(|target| !known.contains(&target.as_str())) {
            return Err(format!("cannot build for '{other}' on this machine; pass --target {}", known.join(" or ")));
        }
        if options.targets.is_empty() {
            options.targets.push(gnu);
        }
        // The documents of the other architecture are written by this one's build with the same features.
        options.targets.sort_by_key(|target| target == OTHER_STATIC);
        if options.targets.iter().any(|target| target == OTHER_STATIC) && !options.targets.contains(&musl) {
            return Err(format!("--target {OTHER_STATIC} needs --target {musl}, which writes its manual pages"));
        }
        Ok(options)
    }
}

/// Returns the prefix of the file names for a target.
fn name(target: &str) -> String {
    format!("unweight-{VERSION}-{target}")
}

/// Builds all files of a release.
pub fn run_task(arguments: &[String]) -> Result<(), String> {
    let options = Options::parse(arguments)?;
    let compiler = run::output(Command::new("rustc").arg("--version"))?;
    if let Some(command) = pinned(&compiler, env::vars_os().map(|(name, _)| name))? {
        return run({ command }.args(arguments));
    }
    // Read the key before a build of many minutes.
    let secret = options.key.as_deref().map(|key| secret_key(key, options.password_file.as_deref())).transpose()?;
    let changed = git(&["status", "--porcelain"])?;
    if !changed.is_empty() && !options.allows_dirty {
        return Err(format!("files differ from the commit; commit them or pass --allow-dirty:\n{changed}"));
    }
    check_tags(&git(&["tag", "--points-at", "HEAD", "v*"])?, &read(&root().join("CHANGELOG.md"))?)?;
    let epoch = env::var("SOURCE_DATE_EPOCH").or_else(|_| git(&["log", "-1", "--format=%ct"]))?;
    let cyclonedx = sbom::cyclonedx()?;

    let out = create_empty(&options.out)?;
    let mut writer = None;
    for target in &options.targets {
        let command = build_target(target, &epoch, &cyclonedx, &out, writer.as_deref())?;
        if target.ends_with("musl") {
            writer = Some(command);
        }
    }
    write(&out.join(format!("unweight-{VERSION}.build.txt")), build_record(&epoch)?)?;
    for file in SCRIPTS {
        fs::copy(root().join(file), out.join(file)).map_err(|error| format!("{file}: {error}"))?;
    }
    write_sums(&out)?;
    if let Some(secret) = secret {
        sign(&out, &secret)?;
    }
    println!("{}", out.display());
    Ok(())
}

/// Returns whether an environment variable of the caller may change the bytes of a build.
fn changes_bytes(name: &str) -> bool {
    const NAMES: [&str; 12] = [
        "RUSTC",
        "RUSTC_BOOTSTRAP",
        "RUSTC_WORKSPACE_WRAPPER",
        "RUSTC_WRAPPER",
        "RUSTFLAGS",
        "CARGO_ENCODED_RUSTFLAGS",
        "AR",
        "CC",
        "CFLAGS",
        "CXX",
        "CXXFLAGS",
        "LDFLAGS",
    ];
    let is_of_target = name.starts_with("CARGO_TARGET_") && name != "CARGO_TARGET_DIR";
    // CFLAGS_x86_64_unknown_linux_gnu and the like are read by the crate `cc`.
    let is_of_cc = ["AR_", "CC_", "CFLAGS_", "CXX_", "CXXFLAGS_", "HOST_", "TARGET_"];
    NAMES.contains(&name)
        || is_of_target
        || ["CARGO_BUILD_", "CARGO_PROFILE_DIST_", "CARGO_PROFILE_RELEASE_"]
            .iter()
            .chain(&is_of_cc)
            .any(|prefix| name.starts_with(prefix))
}

/// Returns `cargo xtask dist` with the compiler of a release and without the variables that change bytes, or `None` if
/// this process already runs so. `compiler` is what `rustc --version` prints.
fn pinned(compiler: &str, variables: impl Iterator<Item = OsString>) -> Result<Option<Command>, String> {
    let removed: Vec<OsString> = variables.filter(|name| name.to_str().is_some_and(changes_bytes)).collect();
    let is_pinned = compiler.starts_with(&format!("rustc {COMPILER} "));
    if is_pinned && removed.is_empty() {
        return Ok(None);
    }
    let mut command = Command::new("cargo");
    command.args(["xtask", "dist"]);
    for name in &removed {
        eprintln!("without {}, which may change bytes", name.display());
        command.env_remove(name);
    }
    // Cargo names itself in this variable.
    command.env_remove("CARGO");
    if !is_pinned {
        let has_it = Command::new("rustc").arg("--version").env("RUSTUP_TOOLCHAIN", COMPILER).output();
        let has_it = has_it.is_ok_and(|output| output.stdout.starts_with(format!("rustc {COMPILER} ").as_bytes()));
        if !has_it {
            let install = format!("rustup toolchain install {COMPILER} --profile minimal");
            return Err(format!("a release needs Rust {COMPILER}, but this is {compiler}; run `{install}`"));
        }
        command.env("RUSTUP_TOOLCHAIN", COMPILER);
    }
    Ok(Some(command))
}

/// Returns the name in a line of `SHA256SUMS` if it is that of a file of a release.
fn released_name(line: &str) -> Option<&str> {
    let (digest, name) = line.split_once("  ")?;
    let is_digest = digest.len() == 64 && digest.bytes().all(|byte| byte.is_ascii_hexdigit());
    let is_ours = name.starts_with("unweight-") || SCRIPTS.contains(&name);
    (is_digest && is_ours && !name.contains('/')).then_some(name)
}

/// Makes an empty directory and returns its absolute path. Of an existing directory, removes the files that its
/// `SHA256SUMS` lists, with their signatures and attestations; refuses other files before it removes any.
fn create_empty(out: &Path) -> Result<PathBuf, String> {
    let io = |error: io::Error| format!("{}: {error}", out.display());
    if out.exists() {
        let sums = fs::read_to_string(out.join(SUMS)).unwrap_or_default();
        let names: Vec<&str> = sums.lines().filter_map(released_name).chain([SUMS]).collect();
        let mut files = Vec::new();
        for entry in fs::read_dir(out).map_err(io)? {
            let entry = entry.map_err(io)?;
            let name = entry.file_name().to_string_lossy().into_owned();
            let stem = [".minisig", ".sigstore.json"].iter().find_map(|end| name.strip_suffix(end)).unwrap_or(&name);
            if !names.contains(&stem) || entry.file_type().map_err(io)?.is_dir() {
                return Err(format!(
                    "{}: not a file of an earlier release in {}, whose {SUMS} does not list it; move it or choose \
                     another directory",
                    entry.path().display(),
                    out.display()
                ));
            }
            files.push(entry.path());
        }
        for file in files {
            fs::remove_file(&file).map_err(|error| format!("{}: {error}", file.display()))?;
        }
    }
    fs::create_dir_all(out).and_then(|()| fs::canonicalize(out)).map_err(io)
}

/// Checks that a commit with a version tag has that version, and that the changelog states its date.
fn check_tags(tags: &str, changelog: &str) -> Result<(), String> {
    if tags.is_empty() {
        return Ok(());
    }
    if !tags.lines().any(|tag| tag == format!("v{VERSION}")) {
        return Err(format!(
            "the commit has the tag {tags}, but Cargo.toml has version {VERSION}; tag the commit v{VERSION}"
        ));
    }
    let heading = format!("## [{VERSION}] - ");
    let date = changelog.lines().find_map(|line| line.strip_prefix(&heading)).unwrap_or_default();
    if date.len() == "2000-01-01".len() && date.starts_with(|c: char| c.is_ascii_digit()) {
        return Ok(());
    }
    Err(format!("CHANGELOG.md has no date for {VERSION}; write '{heading}YYYY-MM-DD', commit and tag again"))
}

/// Makes the archives, the wheel and the SBOMs for a target, and returns the command. `writer` is the static command of
/// this machine, for the documents of one that it cannot run.
fn build_target(
    target: &str,
    epoch: &str,
    cyclonedx: &Path,
    out: &Path,
    writer: Option<&Path>,
) -> Result<PathBuf, String> {
    let (command, wheel) = build_command(target, epoch)?;
    let writer = writer.filter(|_| target == OTHER_STATIC).unwrap_or(&command);
    archive(&command, writer, &name(target), epoch, out)?;
    let features: &[&str] = match wheel {
        Some(_) => &["--features", "full"],
        None => &["--no-default-features", "--features", MUSL_FEATURES],
    };
    let of_target = ["--target", target];
    let of_command = sbom::generate(cyclonedx, &sbom::COMMAND, &[features, &of_target].concat(), epoch)?;
    write(&out.join(format!("{}.cdx.json", name(target))), sbom::text(&of_command))?;
    if let Some(wheel) = &wheel {
        let name = wheel.file_name().ok_or("the wheel has no name")?;
        fs::copy(wheel, out.join(name)).map_err(|error| format!("{}: {error}", wheel.display()))?;
        let stem = wheel.file_stem().unwrap_or_default().to_string_lossy();
        let of_extension = sbom::generate(cyclonedx, &sbom::EXTENSION, &of_target, epoch)?;
        let of_wheel = sbom::merge(of_extension, &of_command)?;
        write(&out.join(format!("{stem}.cdx.json")), sbom::text(&of_wheel))?;
    }
    Ok(command)
}

/// Builds the command, and the wheel if this target has one.
fn build_command(target: &str, epoch: &str) -> Result<(PathBuf, Option<PathBuf>), String> {
    let wrapper = env::current_exe().map_err(|error| format!("xtask: {error}"))?;
    let variables = [
        ("RUSTC_WRAPPER", wrapper.into_os_string()),
        (rustc::ROOT, root().into()),
        (rustc::LIBRARY, rustc::library()?.into()),
        ("SOURCE_DATE_EPOCH", epoch.into()),
        ("CARGO_INCREMENTAL", "0".into()),
        ("CARGO_PROFILE_DIST_DEBUG", "0".into()),
        ("CARGO_PROFILE_DIST_STRIP", "symbols".into()),
    ];
    if target.ends_with("gnu") {
        let (wheel, command) = wheel::dist(&variables)?;
        return Ok((command, Some(wheel)));
    }
    let library = run::output(Command::new("rustc").args(["--print", "target-libdir", "--target", target]))?;
    if !Path::new(&library).is_dir() {
        return Err(format!("no standard library for {0}; run `rustup target add {0}`", target));
    }
    // The host's linker would depend on its distribution.
    let arguments = [
        &["zigbuild", "--profile", "dist", "--locked", "--target", target][..],
        &["--package", "unweight", "--bin", "unweight", "--no-default-features", "--features", MUSL_FEATURES],
    ];
    let mut build = cargo();
    build.envs(variables).env("PATH", wheel::dist_path()?);
    // Zig ignores rustc's -static-pie, without which the program has the same address in every process.
    let flags = format!("CARGO_TARGET_{}_RUSTFLAGS", target.to_uppercase().replace('-', "_"));
    build.env(flags, "-Clink-arg=-pie");
    Ok((gpu_pack::command(&mut build, &arguments.concat())?, None))
}

/// Packs the command with its documents, which `writer` writes, twice: gzip is available everywhere, zstd is smaller.
fn archive(command: &Path, writer: &Path, name: &str, epoch: &str, out: &Path) -> Result<(), String> {
    let stage = target_dir("dist-stage");
    setup::remove(&stage)?;
    let folder = stage.join(name);
    let io = |error: io::Error| format!("{}: {error}", folder.display());
    fs::create_dir_all(folder.join("completions")).map_err(io)?;
    fs::copy(command, folder.join("unweight")).map_err(io)?;
    for file in ["LICENSE-APACHE", "LICENSE-MIT", "README.md"] {
        fs::copy(root().join(file), folder.join(file)).map_err(io)?;
    }
    write(&folder.join(notices::FILE), notices::text()?)?;
    // The output may depend on the language and the width of the terminal.
    let unweight_command = || {
        let mut command = Command::new(writer);
        command.env_clear().env("LC_ALL", "C");
        command
    };
    run(unweight_command().args(["man", "--quiet"]).arg(folder.join("man/man1")))?;
    for (shell, file) in [("bash", "unweight.bash"), ("fish", "unweight.fish"), ("zsh", "_unweight")] {
        let script = run::output(unweight_command().args(["completions", shell]))?;
        write(&folder.join("completions").join(file), script + "\n")?;
    }
    let time = epoch.parse().map_err(|error| format!("SOURCE_DATE_EPOCH is {epoch}: {error}"))?;
    let tar = out.join(format!("{name}.tar"));
    let archive = tar_archive(&stage, name, time).map_err(io)?;
    write(&tar, &archive)?;
    let gz = out.join(format!("{name}.tar.gz"));
    let encode = || {
        let mut encoder = flate2::GzBuilder::new().write(Vec::new(), flate2::Compression::best());
        encoder.write_all(&archive)?;
        encoder.finish()
    };
    write(&gz, encode().map_err(io)?)?;
    let python = wheel::dist_tools()?;
    let script = "import sys, zstandard as z
text = open(sys.argv[1], 'rb').read()
open(sys.argv[1] + '.zst', 'wb').write(z.ZstdCompressor(level=19).compress(text))";
    run(Command::new(python).args(["-c", script]).arg(&tar))?;
    fs::remove_file(&tar).map_err(io)
}

/// Returns a reproducible tar archive of a directory in `stage`: sorted names, one owner, one time, two modes.
fn tar_archive(stage: &Path, name: &str, time: u64) -> io::Result<Vec<u8>> {
    let mut builder = tar::Builder::new(Vec::new());
    let mut open = vec![PathBuf::from(name)];
    while let Some(path) = open.pop() {
        let from = stage.join(&path);
        let mut header = tar::Header::new_ustar();
        header.set_mtime(time);
        header.set_uid(0);
        header.set_gid(0);
        if from.is_dir() {
            header.set_entry_type(tar::EntryType::Directory);
            header.set_mode(0o755);
            header.set_size(0);
            builder.append_data(&mut header, path.join(""), io::empty())?;
            let mut names = fs::read_dir(&from)?.map(|entry| Ok(entry?.file_name())).collect::<io::Result<Vec<_>>>()?;
            names.sort();
            open.extend(names.iter().rev().map(|name| path.join(name)));
        } else {
            let text = fs::read(&from)?;
            header.set_mode(if path.ends_with("unweight") { 0o755 } else { 0o644 });
            header.set_size(text.len() as u64);
            builder.append_data(&mut header, &path, text.as_slice())?;
        }
    }
    builder.into_inner()
}

/// Returns the commit and the tools of the build.
fn build_record(epoch: &str) -> Result<String, String> {
    let version_line = |program: &str| -> Result<String, String> {
        let text = run::output(Command::new(program).arg("--version"))?;
        Ok(text.lines().next().unwrap_or_default().to_owned())
    };
    let mut lines = vec![format!("commit {}", git(&["rev-parse", "HEAD"])?), format!("SOURCE_DATE_EPOCH {epoch}")];
    for program in ["rustc", "cargo"] {
        lines.push(version_line(program)?);
    }
    lines.push(format!("cargo-cyclonedx {}", sbom::CYCLONEDX));
    lines.extend(wheel::DIST_TOOLS.map(|tool| tool.replace("==", " ")));
    Ok(lines.join("\n") + "\n")
}

/// Writes the digests of all files.
fn write_sums(out: &Path) -> Result<(), String> {
    let entries = fs::read_dir(out).map_err(|error| format!("{}: {error}", out.display()))?;
    let mut names: Vec<OsString> = entries.filter_map(|entry| Some(entry.ok()?.file_name())).collect();
    names.sort();
    let text = run::output(Command::new("sha256sum").current_dir(out).arg("--").args(&names))?;
    write(&out.join(SUMS), text + "\n")
}

/// Reads a secret key from a file, as `compress --sign` does. The password is the first line of another file.
fn secret_key(key: &Path, password: Option<&Path>) -> Result<SecretKey, String> {
    let key_box = SecretKeyBox::from_string(&read(key)?);
    let secret = match password {
        None => key_box.and_then(SecretKeyBox::into_unencrypted_secret_key),
        Some(file) => {
            let password = read(file)?.lines().next().unwrap_or_default().to_owned();
            key_box.and_then(|key| key.into_secret_key(Some(password)))
        }
    };
    secret.map_err(|error| {
        // minisign writes no checksum into a key without a password.
        let help = "pass a minisign secret key; a key with a password needs --password-file FILE, one without needs \
                    a password (minisign -C -s KEY)";
        format!("{}: not a usable minisign secret key ({error}); {help}", key.display())
    })
}

/// Signs the digests. The signature's trusted comment states the version.
pub fn sign(out: &Path, secret: &SecretKey) -> Result<(), String> {
    let path = out.join(SUMS);
    let bytes = fs::read(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    let (trusted, comment) = (format!("unweight {VERSION} {SUMS}"), "signature of a release");
    let signature = minisign::sign(None, secret, bytes.as_slice(), Some(&trusted), Some(comment));
    write(&out.join(format!("{SUMS}.minisig")), signature.map_err(|error| error.to_string())?.to_string())
}

fn write(path: &Path, text: impl AsRef<[u8]>) -> Result<(), String> {
    fs::write(path, text).map_err(|error| format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn parsed(arguments: &[&str]) -> Result<Options, String> {
        Options::parse(&arguments.iter().map(|&argument| argument.to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn options_are_parsed() {
        let [gnu, musl] = ["gnu", "musl"].map(|libc| format!("{}-unknown-linux-{libc}", env::consts::ARCH));
        assert_eq!(parsed(&[]).unwrap().targets, [gnu.as_str()]);
        let arguments = ["--target", &gnu, "--target", &musl, "--sign", "k", "--password-file", "p"];
        let options = parsed(&arguments).unwrap();
        assert_eq!(options.targets, [gnu.as_str(), &musl]);
        let all = ["--target", OTHER_STATIC, "--target", &musl, "--target", &gnu];
        assert_eq!(parsed(&all).unwrap().targets, [musl.as_str(), &gnu, OTHER_STATIC]);
        assert_eq!((options.key, options.password_file), (Some("k".into()), Some("p".into())));
        for (arguments, message) in [
            (&["--target", "riscv64gc-unknown-linux-gnu"][..], "cannot build for 'riscv64gc"),
            (&["--target", OTHER_STATIC], "which writes its manual pages"),
            (&["--password-file", "p"], "needs --sign"),
            (&["--sign"], "needs a value"),
            (&["out"], "unexpected argument 'out'"),
        ] {
            assert!(parsed(arguments).unwrap_err().contains(message), "{arguments:?}");
        }
    }

    #[test]
    fn tags_match_the_version_and_the_changelog_has_its_date() {
        let changelog = |date: &str| format!("# Changelog\n\n## [{VERSION}] - {date}\n\nFirst.\n");
        let (tag, released) = (format!("v{VERSION}"), changelog("2027-01-31"));
        assert_eq!(check_tags("", &changelog("unreleased")), Ok(()));
        assert_eq!(check_tags(&tag, &released), Ok(()));
        assert!(check_tags("v9.9.9", &released).unwrap_err().contains("the tag v9.9.9"));
        assert!(check_tags(&tag, &changelog("unreleased")).unwrap_err().contains("has no date"));
        assert!(check_tags(&tag, "").unwrap_err().contains("has no date"));
    }

    #[test]
    fn only_files_of_a_release_are_replaced() {
        let out = env::temp_dir().join(format!("unweight-emptied-{}", std::process::id()));
        setup::remove(&out).unwrap();
        create_empty(&out).unwrap();
        let (archive, digest) = (format!("{}.tar.gz", name("t")), "0".repeat(64));
        let sums = format!("{digest}  {archive}\n{digest}  install.sh\n{digest}  thesis.tex\n{digest}  ../other\n");
        let files = [&archive, "install.sh", SUMS, "SHA256SUMS.minisig", &format!("{archive}.sigstore.json")];
        let put = || files.iter().for_each(|file| write(&out.join(file), &sums).unwrap());
        // What is not listed, what no release has, and a directory all stay, and so does everything else.
        for foreign in ["mine", "thesis.tex", "unweight-folder/a.jpg"] {
            put();
            let path = out.join(foreign);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            write(&path, "mine").unwrap();
            let message = create_empty(&out).unwrap_err();
            assert!(message.contains(foreign.split('/').next().unwrap()) && message.contains("move it"), "{message}");
            assert_eq!(fs::read_dir(&out).unwrap().count(), files.len() + 1, "{foreign}");
            assert_eq!(fs::read_to_string(&path).unwrap(), "mine");
            fs::remove_file(&path).unwrap();
            _ = fs::remove_dir(path.parent().unwrap());
        }
        put();
        create_empty(&out).unwrap();
        assert_eq!(fs::read_dir(&out).unwrap().count(), 0);
        fs::remove_dir(&out).unwrap();
    }

    #[test]
    fn builds_use_one_compiler_and_no_flags_of_the_caller() {
        let of = |names: &[&str]| {
            let names: Vec<OsString> = names.iter().map(OsString::from).collect();
            pinned(&format!("rustc {COMPILER} (5980 2026-04-14)"), names.into_iter()).unwrap()
        };
        assert!(of(&["PATH", "HOME", "CARGO", "CARGO_HOME", "CARGO_TARGET_DIR", "CARGO_PKG_NAME"]).is_none());
        for name in ["RUSTFLAGS", "CARGO_PROFILE_DIST_LTO", "CARGO_TARGET_X86_64_UNKNOWN_LINUX_MUSL_RUSTFLAGS", "CC"] {
            let command = of(&["PATH", name]).expect(name);
            let removed = command.get_envs().filter(|(_, value)| value.is_none()).map(|(name, _)| name);
            assert_eq!(removed.collect::<Vec<_>>(), [name.min("CARGO"), name.max("CARGO")]);
        }
        let script = read(&root().join(".ci/release")).unwrap();
        assert!(script.contains(&format!("RUSTUP_TOOLCHAIN={COMPILER} ")), "another compiler in .ci/release");
    }

    #[test]
    fn sums_cover_all_files_and_the_signature_covers_the_sums() {
        let out = env::temp_dir().join(format!("unweight-sums-{}", std::process::id()));
        setup::remove(&out).unwrap();
        fs::create_dir(&out).unwrap();
        write(&out.join("b"), "b").unwrap();
        write(&out.join("a"), "").unwrap();
        write_sums(&out).unwrap();
        let text = fs::read_to_string(out.join(SUMS)).unwrap();
        let empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855  a\n";
        assert!(text.starts_with(empty) && text.ends_with("  b\n") && text.lines().count() == 2, "{text}");

        let keys = minisign::KeyPair::generate_unencrypted_keypair().unwrap();
        write(&out.join("key"), keys.sk.to_box(None).unwrap().to_string()).unwrap();
        sign(&out, &secret_key(&out.join("key"), None).unwrap()).unwrap();
        let signature = fs::read_to_string(out.join(format!("{SUMS}.minisig"))).unwrap();
        let signature = minisign::SignatureBox::from_string(&signature).unwrap();
        let verify = |text: String| minisign::verify(&keys.pk, &signature, io::Cursor::new(text), true, false, false);
        assert!(verify(text.replacen('e', "f", 1)).is_err());
        assert!(verify(text).is_ok());
        assert_eq!(signature.trusted_comment().unwrap(), format!("unweight {VERSION} {SUMS}"));
        fs::remove_dir_all(&out).unwrap();
    }

    /// Made by `minisign -G`. Without optimization, checking its password takes minutes.
    const KEY: &str = concat!(
        "untrusted comment: minisign encrypted secret key\n",
        "RWRTY0IyQormrMq8yorsBwNam6YVKL0NlxexG7bPN0PYhFK+3ZYAAAACAAAAAAAAAEAAAAAA1RMrSzsAq/Yu+nAW1sGlVNC39z1ntMQHRb",
        "PcBr2j+6g8qfOBAalEaQSL1TZrLzQBVJb5W4vfll9pcoAoo55hi6xMGYVRDxQ5T+2k8lrNdJRQ8yG9VEk9rdZbJf/s1/E4KvipkA858Ok=\n"
    );

    /// Made by `minisign -G -W`, version 0.11.
    const OPEN_KEY: &str = concat!(
        "untrusted comment: minisign encrypted secret key\n",
        "RWQAAEIyAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAUBPNeslg8LULCQVdhBEANoyJhzEMBUjU+E",
        "al2+xnyMV/sabChZtEO1QU0QbCoe9gYoIiSZKIwDYw81QrKbTazsHOSrQsxaIHAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=\n"
    );

    #[test]
    fn release_keys_need_their_password() {
        let folder = env::temp_dir().join(format!("unweight-key-{}", std::process::id()));
        setup::remove(&folder).unwrap();
        fs::create_dir(&folder).unwrap();
        let (key, password) = (folder.join("key"), folder.join("password"));
        write(&key, KEY).unwrap();
        let message = secret_key(&key, None).unwrap_err();
        assert!(message.contains("--password-file") && message.contains("key: not a usable"), "{message}");
        assert!(secret_key(&key, Some(&password)).unwrap_err().contains("password: No such file"));
        write(&key, OPEN_KEY).unwrap();
        let message = secret_key(&key, None).unwrap_err();
        assert!(message.contains("one without needs a password (minisign -C -s KEY)"), "{message}");
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn archives_do_not_depend_on_times_owners_and_order() {
        let folder = env::temp_dir().join(format!("unweight-packed-{}", std::process::id()));
        setup::remove(&folder).unwrap();
        let files = ["a/unweight", "a/man/man1/unweight.1", "a/README.md", "a/b"];
        let staged = |name: &str, order: &[&str], mode: u32| {
            for file in order {
                let path = folder.join(name).join(file);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                write(&path, file).unwrap();
                fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            }
            tar_archive(&folder.join(name), "a", 1_700_000_000).unwrap()
        };
        let one = staged("one", &files, 0o600);
        let mut backwards = files;
        backwards.reverse();
        assert!(one == staged("other", &backwards, 0o755));
        let mut archive = tar::Archive::new(one.as_slice());
        let found = archive.entries().unwrap().map(|entry| {
            let entry = entry.unwrap();
            let header = entry.header();
            assert_eq!((header.uid().unwrap(), header.mtime().unwrap()), (0, 1_700_000_000));
            (entry.path().unwrap().display().to_string(), header.mode().unwrap())
        });
        let names = ["a/", "a/README.md", "a/b", "a/man/", "a/man/man1/", "a/man/man1/unweight.1", "a/unweight"];
        let modes = [0o755, 0o644, 0o644, 0o755, 0o755, 0o644, 0o755];
        assert_eq!(found.collect::<Vec<_>>(), names.map(str::to_owned).into_iter().zip(modes).collect::<Vec<_>>());
        fs::remove_dir_all(&folder).unwrap();
    }
}
