//! `cargo xtask test-release`: tests the files of a release in clean systems. Runs `install.sh` in clean Debian and
//! Ubuntu roots and one with musl against a file server on loopback, and the wheel in each supported Python.

use std::{
    env, fs,
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

use crate::{
    dist::{self, OTHER_STATIC, SUMS, VERSION},
    run::{self, cache_dir, root, run, succeeds, target_dir},
    setup,
};

/// Clean Debian and Ubuntu systems, and their packages besides the essential ones.
const SYSTEMS: [(&str, &str); 3] = [("bookworm", "curl,minisign"), ("trixie", "wget,zstd"), ("jammy", "curl")];
/// Debian's suites since debootstrap has one script for all of them. Any other suite is taken to be Ubuntu's.
const DEBIAN: [&str; 8] = ["bullseye", "bookworm", "trixie", "forky", "stable", "testing", "unstable", "sid"];
/// Ubuntu's mirror; the keys that sign it, from its package `ubuntu-keyring`; and debootstrap's script for every suite
/// since 2007. It may have no link of the suite's own name.
const UBUNTU: (&str, &str, &str) =
    ("http://archive.ubuntu.com/ubuntu", "/usr/share/keyrings/ubuntu-archive-keyring.gpg", "gutsy");
/// A Debian suite with a newer Python than this machine may have.
const NEWEST_PYTHON: (&str, &str) = ("sid", "python3-venv");
/// Supported minor versions of Python 3.
const PYTHONS: std::ops::RangeInclusive<u32> = 10..=14;
/// Maximum time of an installation.
const INSTALL_SECONDS: u64 = 10;
/// A script that uses the installed wheel.
const WHEEL_SCRIPT: &str = "import sys, unweight
unweight.compress(sys.argv[1], sys.argv[2], profile='packed')
unweight.decompress(sys.argv[2], sys.argv[3])
print(sys.version.split()[0])";

/// Tests the files of `cargo xtask dist`.
pub fn run_task(arguments: &[String]) -> Result<(), String> {
    let (mut files, mut suites) = (target_dir(dist::OUT), Vec::new());
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        let mut value = || rest.next().ok_or_else(|| format!("'{argument}' needs a value"));
        match argument.as_str() {
            "--files" => files = value()?.into(),
            "--suite" => suites.push(value()?.clone()),
            other => return Err(format!("unexpected argument '{other}'; see `cargo xtask help`")),
        }
    }
    run(Command::new("sha256sum").current_dir(&files).args(["--check", "--quiet", "--strict", SUMS]))?;
    let site = Site::new(&files)?;
    let mut systems: Vec<(&str, &str)> = SYSTEMS.into();
    systems.extend(suites.iter().map(|suite| (suite.as_str(), "curl")));
    for (suite, packages) in systems {
        // Debian 12 has no package with Ubuntu's keys.
        if !suites.iter().any(|asked| asked == suite) && !can_bootstrap(suite) {
            println!("skipped: {suite}; {} does not exist (ubuntu-keyring)", UBUNTU.1);
            continue;
        }
        let home = bootstrap(suite, packages)?;
        test_clean_system(suite, &home, &site)?;
        if succeeds(chroot(&home).args(["sh", "-c", "command -v minisign"])) {
            test_signature(suite, &home, &site)?;
        }
    }
    test_musl(&files, &site)?;
    test_emulated(&files)?;
    test_wheels(&files)
}

/// A file server with the release, a release with a flipped bit in its archive, and a release with a truncated archive.
struct Site {
    server: Child,
    address: String,
    public_key: String,
}

impl Drop for Site {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

impl Site {
    fn new(files: &Path) -> Result<Self, String> {
        let home = target_dir("release-site");
        setup::remove(&home)?;
        let io = |error: std::io::Error| format!("{}: {error}", home.display());
        let keys = minisign::KeyPair::generate_unencrypted_keypair().map_err(|error| error.to_string())?;
        for (name, is_sound) in [("sound", true), ("changed", false), ("cut", false)] {
            for folder in ["latest/download".to_owned(), format!("download/v{VERSION}")] {
                let to = home.join(name).join(folder);
                fs::create_dir_all(&to).map_err(io)?;
                for entry in fs::read_dir(files).map_err(io)?.flatten() {
                    let mut bytes = fs::read(entry.path()).map_err(io)?;
                    if !is_sound && entry.file_name().to_string_lossy().contains(".tar.") {
                        let middle = bytes.len() / 2;
                        bytes[middle] ^= 1;
                        bytes.truncate(if name == "cut" { middle } else { bytes.len() });
                    }
                    fs::write(to.join(entry.file_name()), bytes).map_err(io)?;
                }
                dist::sign(&to, &keys.sk)?;
            }
        }
        let port = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).map_err(io)?.port();
        let mut server = Command::new(setup::host_python()?);
        server.args(["-m", "http.server", "--bind", "127.0.0.1", "--directory"]).arg(&home).arg(port.to_string());
        let server = server.stdout(Stdio::null()).stderr(Stdio::null()).spawn().map_err(io)?;
        let site = Self { server, address: format!("http://127.0.0.1:{port}"), public_key: keys.pk.to_base64() };
        let start = Instant::now();
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            if start.elapsed() > Duration::from_secs(20) {
                return Err(format!("the file server does not listen at {}", site.address));
            }
            thread::sleep(Duration::from_millis(50));
        }
        Ok(site)
    }
}

/// Returns debootstrap's arguments for a suite, up to the directory, and those after it.
fn debootstrap_arguments(suite: &str, packages: &str) -> (Vec<String>, Vec<String>) {
    let mut before = vec!["--variant=minbase".to_owned(), format!("--include={packages}")];
    let mut after = Vec::new();
    if !DEBIAN.contains(&suite) {
        let (mirror, keys, script) = UBUNTU;
        before.push(format!("--keyring={keys}"));
        // Without its keys, debootstrap checks no signature unless an option asks for it.
        before.push("--force-check-gpg".to_owned());
        after.extend([mirror, &format!("/usr/share/debootstrap/scripts/{script}")].map(str::to_owned));
    }
    before.push(suite.to_owned());
    (before, after)
}

/// Whether this machine has the keys of a suite, which come with debootstrap for Debian.
fn can_bootstrap(suite: &str) -> bool {
    DEBIAN.contains(&suite) || Path::new(UBUNTU.1).exists()
}

/// Makes the root of a clean Debian or Ubuntu in the user's cache.
fn bootstrap(suite: &str, packages: &str) -> Result<PathBuf, String> {
    let home = cache_dir(&format!("root-{suite}"));
    if !home.join("done").exists() {
        if !can_bootstrap(suite) {
            let package =
                "install Ubuntu's package ubuntu-keyring (in some releases of Debian: ubuntu-archive-keyring)";
            return Err(format!("{suite}: {} does not exist; {package}", UBUNTU.1));
        }
        setup::remove(&home)?;
        let (before, after) = debootstrap_arguments(suite, packages);
        run(Command::new("debootstrap").args(before).arg(&home).args(after).stdout(Stdio::null()))
            .map_err(|error| format!("{error}; this needs root and debootstrap: `apt-get install debootstrap`"))?;
        fs::write(home.join("done"), "").map_err(|error| format!("{}: {error}", home.display()))?;
    }
    Ok(home)
}

/// Returns a command that runs in a root without this process's environment.
fn chroot(home: &Path) -> Command {
    let mut command = Command::new("chroot");
    command.arg(home).env_clear().env("HOME", "/root").env("PATH", "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin");
    command
}

/// Runs `install.sh` in a root. `key` replaces the publisher's, whose secret key is elsewhere.
fn install(home: &Path, releases: &str, key: &str, arguments: &[&str]) -> Result<Output, String> {
    let script = home.join("root/install.sh");
    fs::copy(root().join("install.sh"), &script).map_err(|error| format!("{}: {error}", script.display()))?;
    let mut command = chroot(home);
    command.args(["sh", "/root/install.sh"]).args(arguments).env("UNWEIGHT_RELEASES", releases);
    command.env("UNWEIGHT_PUBLIC_KEY", key).output().map_err(|error| format!("chroot: {error}"))
}

/// Returns the names in `~/.local/bin` of a root.
fn installed(home: &Path) -> Vec<String> {
    let entries = fs::read_dir(home.join("root/.local/bin")).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

/// Fails unless the installation failed with this message and exactly `left` is installed.
fn check_refused(system: &str, home: &Path, output: &Output, message: &str, left: &[&str]) -> Result<(), String> {
    let text = String::from_utf8_lossy(&output.stderr);
    if output.status.success() || !text.contains(message) {
        return Err(format!(
            "{system}: install.sh should fail with '{message}', but its result is {}: {text}",
            output.status
        ));
    }
    let found = installed(home);
    if found == left {
        Ok(())
    } else {
        Err(format!("{system}: after '{message}', ~/.local/bin has {found:?} instead of {left:?}"))
    }
}

/// Installs, uses and removes the command, and checks that bad releases are refused.
fn test_clean_system(system: &str, home: &Path, site: &Site) -> Result<(), String> {
    setup::remove(&home.join("root/.local"))?;
    let closed = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
    let closed = format!("http://{}", closed.map_err(|error| error.to_string())?);
    let release = |name: &str| format!("{}/{name}", site.address);
    let refused = |left: &[&str]| -> Result<(), String> {
        for (from, message) in
            [(&release("changed"), "has SHA-256"), (&release("cut"), "has SHA-256"), (&closed, "cannot fetch")]
        {
            check_refused(system, home, &install(home, from, &site.public_key, &[])?, message, left)?;
        }
        Ok(())
    };
    refused(&[])?;
    let start = Instant::now();
    let output = install(home, &release("sound"), &site.public_key, &[])?;
    let seconds = start.elapsed().as_secs_f64();
    if !output.status.success() {
        return Err(format!("{system}: {}", String::from_utf8_lossy(&output.stderr)));
    }
    if seconds > INSTALL_SECONDS as f64 {
        return Err(format!("{system}: install.sh took {seconds:.1} s; the limit is {INSTALL_SECONDS} s"));
    }
    let unweight = |arguments: &[&str]| run::output(chroot(home).arg("/root/.local/bin/unweight").args(arguments));
    let version = unweight(&["--version"])?;
    if version != format!("unweight {VERSION}") {
        return Err(format!("{system}: `unweight --version` printed '{version}' instead of 'unweight {VERSION}'"));
    }
    unweight(&["demo"])?;
    refused(&["unweight"])?;
    let output = install(home, &release("sound"), &site.public_key, &["--uninstall"])?;
    if !output.status.success() || !installed(home).is_empty() {
        return Err(format!("{system}: install.sh --uninstall failed: {}", String::from_utf8_lossy(&output.stderr)));
    }
    println!("{system}: installed in {seconds:.1} s");
    Ok(())
}

/// Checks signatures with the real minisign.
fn test_signature(system: &str, home: &Path, site: &Site) -> Result<(), String> {
    let from = format!("{}/sound", site.address);
    let install_with_key = |key: &str| install(home, &from, key, &["--require-signature"]);
    let other = minisign::KeyPair::generate_unencrypted_keypair().map_err(|error| error.to_string())?;
    check_refused(system, home, &install_with_key(&other.pk.to_base64())?, "is not by", &[])?;
    let output = install_with_key(&site.public_key)?;
    if !output.status.success() || installed(home) != ["unweight"] {
        return Err(format!("{system}: {}", String::from_utf8_lossy(&output.stderr)));
    }
    println!("{system}: signature checked by minisign");
    Ok(())
}

/// Tests a system with busybox and musl, Debian's packages of both; Alpine has others. Without a build for musl, the
/// script must fail and name musl.
fn test_musl(files: &Path, site: &Site) -> Result<(), String> {
    let home = target_dir("root-musl");
    setup::remove(&home)?;
    for folder in ["bin", "dev", "root", "tmp", "packages"] {
        fs::create_dir_all(home.join(folder)).map_err(|error| format!("{}: {error}", home.display()))?;
    }
    let packages = home.join("packages");
    // By default, apt as root downloads as another user, who cannot write here.
    let fetch = ["-qq", "-o", "APT::Sandbox::User=root", "download", "busybox-static", "musl"];
    run(Command::new("apt-get").current_dir(&packages).args(fetch))?;
    for entry in fs::read_dir(&packages).into_iter().flatten().flatten() {
        run(Command::new("dpkg-deb").arg("-x").arg(entry.path()).arg(&home))?;
    }
    run(Command::new("mknod").arg(home.join("dev/null")).args(["c", "1", "3"]))?;
    run(chroot(&home).args(["/bin/busybox", "--install", "-s", "/bin"]))?;
    if files.join(format!("unweight-{VERSION}-{}-unknown-linux-musl.tar.gz", env::consts::ARCH)).exists() {
        return test_clean_system("musl", &home, site);
    }
    let output = install(&home, &format!("{}/sound", site.address), &site.public_key, &[])?;
    check_refused("musl", &home, &output, "no build for musl libc", &[])?;
    println!("musl: install.sh refused the system, as it should");
    Ok(())
}

/// Compresses and restores a model with the static command for the other architecture, under QEMU.
fn test_emulated(files: &Path) -> Result<(), String> {
    let name = format!("unweight-{VERSION}-{OTHER_STATIC}");
    let archive = files.join(format!("{name}.tar.gz"));
    let emulator = format!("qemu-{}-static", OTHER_STATIC.split('-').next().unwrap_or_default());
    if !archive.exists() {
        println!("skipped: {OTHER_STATIC}; {} has no archive for it", files.display());
        return Ok(());
    }
    if !succeeds(Command::new(&emulator).arg("--version")) {
        return Err(format!("{emulator} is not installed, which runs {name}; run `apt-get install qemu-user-static`"));
    }
    let work = target_dir("release-emulated");
    setup::remove(&work)?;
    fs::create_dir_all(&work).map_err(|error| format!("{}: {error}", work.display()))?;
    run(Command::new("tar").arg("-xzf").arg(&archive).arg("-C").arg(&work))?;
    let unweight = |arguments: &[&str]| {
        let mut command = Command::new(&emulator);
        command.current_dir(&work).arg(work.join(&name).join("unweight")).args(arguments);
        command
    };
    let version = run::output(&mut unweight(&["--version"]))?;
    if version != format!("unweight {VERSION}") {
        return Err(format!("{archive:?}: `unweight --version` printed '{version}'"));
    }
    fs::create_dir(work.join("model")).map_err(|error| format!("{}: {error}", work.display()))?;
    // 256 x 256 values of BF16: 1.0, and its neighbours in the last mantissa bits.
    let header = r#"{"w":{"dtype":"BF16","shape":[256,256],"data_offsets":[0,131072]}}"#;
    let values = (0..65536_u32).flat_map(|at| (0x3f80 + (at % 61) as u16).to_le_bytes());
    let file: Vec<u8> = (header.len() as u64).to_le_bytes().into_iter().chain(header.bytes()).chain(values).collect();
    fs::write(work.join("model/model.safetensors"), file).map_err(|error| format!("{}: {error}", work.display()))?;
    run(&mut unweight(&["compress", "model", "-o", "bundle", "--quiet"]))?;
    run(&mut unweight(&["decompress", "bundle", "-o", "restored", "--quiet"]))?;
    run(Command::new("diff").current_dir(&work).args(["-r", "model", "restored"]))?;
    println!("{OTHER_STATIC}: a model is restored under QEMU");
    setup::remove(&work)
}

/// Installs the wheel into each clean Python, then compresses and restores a model.
fn test_wheels(files: &Path) -> Result<(), String> {
    let entries = fs::read_dir(files).map_err(|error| format!("{}: {error}", files.display()))?;
    let mut paths = entries.flatten().map(|entry| entry.path());
    let Some(wheel) = paths.find(|path| path.extension().is_some_and(|extension| extension == "whl")) else {
        println!("skipped: the wheel; {} has none", files.display());
        return Ok(());
    };
    let work = target_dir("release-python");
    setup::remove(&work)?;
    fs::create_dir_all(&work).map_err(|error| format!("{}: {error}", work.display()))?;
    let mut missing = Vec::new();
    for minor in PYTHONS {
        match python(minor) {
            Some(python) => {
                test_wheel(&python, &wheel, &work.join(minor.to_string()), &mut |program| Command::new(program))?;
            }
            None => missing.push(minor),
        }
    }
    if !missing.is_empty() {
        let (suite, packages) = NEWEST_PYTHON;
        let home = bootstrap(suite, packages)?;
        let arguments = ["python3", "-c", "import sys; print(sys.version_info.minor)"];
        let minor: u32 =
            run::output(chroot(&home).args(arguments))?.parse().map_err(|_| "python3 printed no version")?;
        if missing.contains(&minor) {
            let path_in_root = Path::new("/root").join(wheel.file_name().unwrap_or_default());
            fs::copy(&wheel, home.join(path_in_root.strip_prefix("/").unwrap_or(&path_in_root)))
                .map_err(|error| format!("{}: {error}", home.display()))?;
            setup::remove(&home.join("root/work"))?;
            let mut in_root = |program: &Path| {
                let mut command = chroot(&home);
                command.arg(program);
                command
            };
            test_wheel(Path::new("python3"), &path_in_root, Path::new("/root/work"), &mut in_root)?;
            setup::remove(&home.join("root/work"))?;
            missing.retain(|&other| other != minor);
        }
    }
    for minor in missing {
        println!("skipped: Python 3.{minor}, which is neither on PATH nor in ~/.pyenv");
    }
    setup::remove(&work)
}

/// Finds a Python of this minor version.
fn python(minor: u32) -> Option<PathBuf> {
    let name = format!("python3.{minor}");
    let versions = PathBuf::from(env::var_os("HOME")?).join(".pyenv/versions");
    let pyenv_pythons =
        fs::read_dir(versions).into_iter().flatten().flatten().map(|entry| entry.path().join("bin").join(&name));
    // Debian's Python has no ensurepip without python3-venv.
    pyenv_pythons
        .chain([PathBuf::from(&name)])
        .find(|python| succeeds(Command::new(python).args(["-m", "ensurepip", "--version"])))
}

fn test_wheel(
    python: &Path,
    wheel: &Path,
    work: &Path,
    command: &mut dyn FnMut(&Path) -> Command,
) -> Result<(), String> {
    let venv = work.join("venv");
    run(command(python).args(["-m", "venv"]).arg(&venv))?;
    let python_in_venv = venv.join("bin/python");
    let pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index"];
    run(command(&python_in_venv).args(pip).arg(wheel))?;
    run::output(command(&venv.join("bin/unweight")).args(["demo", "--dir"]).arg(work.join("demo")))?;
    let folders = ["demo/model", "bundle", "restored"].map(|name| work.join(name));
    let version = run::output(command(&python_in_venv).args(["-c", WHEEL_SCRIPT]).args(&folders))?;
    run(command(Path::new("diff")).arg("-r").args([&folders[0], &folders[2]]))?;
    println!("Python {version}: the wheel works");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suites_of_ubuntu_have_its_mirror_keys_and_script() {
        let (before, after) = debootstrap_arguments("noble", "curl");
        assert_eq!(before.last().map(String::as_str), Some("noble"));
        assert!(before.contains(&format!("--keyring={}", UBUNTU.1)), "{before:?}");
        assert_eq!(after, [UBUNTU.0, "/usr/share/debootstrap/scripts/gutsy"]);
        for (suite, _) in SYSTEMS.iter().filter(|(suite, _)| *suite != "jammy").chain([&NEWEST_PYTHON]) {
            let (before, after) = debootstrap_arguments(suite, "curl");
            assert_eq!(before, ["--variant=minbase", "--include=curl", suite]);
            assert!(after.is_empty(), "{suite}");
        }
    }
}
