//! All environment variables that Unweight reads, in one table, parsed once.
//!
//! The documentation prints `VARIABLES` (docs/reference/environment.md; a test compares both). [`Env`] is the parsed
//! form for the rest of the crate; no other module reads the environment, so a test can pass any [`Env`].

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

/// A documented environment variable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Variable {
    /// The name of the variable.
    pub name: &'static str,
    /// The accepted values.
    pub values: &'static str,
    /// The value when it is unset or empty.
    pub default: &'static str,
    /// The effect of the variable.
    pub meaning: &'static str,
}

/// Unweight's own variables, sorted by name.
pub(crate) const VARIABLES: &[Variable] = &[
    Variable {
        name: "UNWEIGHT_CACHE_DIR",
        values: "absolute path",
        default: "`$XDG_CACHE_HOME/unweight`, else `$HOME/.cache/unweight`",
        meaning: "root of the kernel cache",
    },
    Variable {
        name: "UNWEIGHT_CACHE_MAX",
        values: "bytes; `K`, `M`, `G` are powers of 1024",
        default: "`1G`",
        meaning: "size to which `cache prune` shrinks the cache",
    },
    Variable {
        name: "UNWEIGHT_CUBLAS",
        values: "libcublas or its directory",
        default: "searched for",
        meaning: "cuBLAS, for raw and expanded weights and the baseline",
    },
    Variable {
        name: "UNWEIGHT_JIT",
        values: "`auto`, `cache-only`, `off`",
        default: "`auto`",
        meaning: "`auto` compiles what the cache lacks; `cache-only` never compiles; `off` uses no cache: every start compiles every kernel",
    },
    Variable {
        name: "UNWEIGHT_JIT_THREADS",
        values: "1 to 256",
        default: "number of processors",
        meaning: "kernels compiled at the same time",
    },
    Variable {
        name: "UNWEIGHT_LOCK_SECONDS",
        values: "0 to 3600",
        default: "`60`",
        meaning: "wait for another process that compiles the same kernel",
    },
    Variable {
        name: "UNWEIGHT_NVRTC",
        values: "libnvrtc or its directory",
        default: "searched for",
        meaning: "NVRTC, the compiler",
    },
];

/// How the cache and the compiler are used when kernels are needed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum JitMode {
    /// Compile missing kernels and store them.
    #[default]
    Auto,
    /// Fail with the names of all missing kernels.
    CacheOnly,
    /// Compile every kernel in memory; neither read nor write the cache.
    Off,
}

impl JitMode {
    /// Returns the value of `UNWEIGHT_JIT` that selects this mode.
    pub const fn name(self) -> &'static str {
        match self {
            JitMode::Auto => "auto",
            JitMode::CacheOnly => "cache-only",
            JitMode::Off => "off",
        }
    }
}

/// A variable with a value that is not documented.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name}={value:?}: expected {expected}; correct or unset it")]
#[non_exhaustive]
pub struct EnvError {
    /// The name of the variable.
    pub name: &'static str,
    /// The value of the variable.
    pub value: String,
    /// The accepted values.
    pub expected: &'static str,
}

impl EnvError {
    /// Returns the stable code of this error; docs/reference/errors.md lists all.
    pub fn code(&self) -> &'static str {
        "environment-variable-invalid"
    }
}

/// The directories in which libraries are searched for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct SearchPaths {
    /// Roots of Python environments, the active one first (`VIRTUAL_ENV`, `CONDA_PREFIX`, then from `PATH`).
    pub python_prefixes: Vec<PathBuf>,
    /// Directories that are themselves a Python path entry (`PYTHONPATH`).
    pub python_path: Vec<PathBuf>,
    /// CUDA toolkits (`CUDA_HOME`, `CUDA_PATH`, `/usr/local/cuda`).
    pub toolkits: Vec<PathBuf>,
    /// The dynamic loader's directories (`LD_LIBRARY_PATH`).
    pub loader_path: Vec<PathBuf>,
}

/// The parsed environment.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Env {
    /// Root of the kernel cache; `None` if the environment names no cache directory.
    pub cache_dir: Option<PathBuf>,
    /// The size in bytes to which `prune` shrinks the cache.
    pub cache_max_bytes: u64,
    /// What to do with a kernel that is not in the cache.
    pub jit: JitMode,
    /// The number of kernels compiled at the same time.
    pub jit_threads: usize,
    /// How long to wait for another process that is compiling the same kernel.
    pub lock_timeout: Duration,
    /// The value of `UNWEIGHT_NVRTC`.
    pub nvrtc: Option<PathBuf>,
    /// The value of `UNWEIGHT_CUBLAS`.
    pub cublas: Option<PathBuf>,
    /// Where to search for libraries.
    pub(crate) search: SearchPaths,
}

impl Env {
    /// Returns the process's environment, parsed on the first call.
    pub fn process() -> Result<&'static Env, EnvError> {
        static PROCESS: OnceLock<Result<Env, EnvError>> = OnceLock::new();
        PROCESS.get_or_init(|| Env::parse(|name| std::env::var_os(name))).as_ref().map_err(Clone::clone)
    }

    /// Parses an environment given as a lookup function. An empty value counts as unset.
    pub fn parse(lookup: impl Fn(&str) -> Option<OsString>) -> Result<Env, EnvError> {
        let get = |name: &str| lookup(name).filter(|value| !value.is_empty());
        let path = |name: &str| get(name).map(PathBuf::from);
        let cache_dir = match path("UNWEIGHT_CACHE_DIR") {
            // A relative root would be another cache in every working directory.
            Some(dir) if dir.is_absolute() => Some(dir),
            Some(dir) => return Err(bad("UNWEIGHT_CACHE_DIR", &dir.to_string_lossy())),
            // The XDG specification requires that relative values are ignored.
            None => path("XDG_CACHE_HOME")
                .filter(|dir| dir.is_absolute())
                .or_else(|| path("HOME").filter(|dir| dir.is_absolute()).map(|home| home.join(".cache")))
                .map(|dir| dir.join("unweight")),
        };
        Ok(Env {
            cache_dir,
            cache_max_bytes: parsed(&get, "UNWEIGHT_CACHE_MAX", 1 << 30, parse_bytes)?,
            jit: parsed(&get, "UNWEIGHT_JIT", JitMode::Auto, |text| match text {
                "auto" => Some(JitMode::Auto),
                "cache-only" => Some(JitMode::CacheOnly),
                "off" => Some(JitMode::Off),
                _ => None,
            })?,
            jit_threads: parsed(
                &get,
                "UNWEIGHT_JIT_THREADS",
                std::thread::available_parallelism().map_or(1, |count| count.get().min(256)),
                |text| text.parse().ok().filter(|count| (1..=256).contains(count)),
            )?,
            lock_timeout: parsed(&get, "UNWEIGHT_LOCK_SECONDS", Duration::from_secs(60), |text| {
                text.parse().ok().filter(|seconds| *seconds <= 3600).map(Duration::from_secs)
            })?,
            nvrtc: path("UNWEIGHT_NVRTC"),
            cublas: path("UNWEIGHT_CUBLAS"),
            search: SearchPaths::parse(&get),
        })
    }

    /// Returns those of `names` that look like Unweight's but are not in the table: most likely misspelt.
    ///
    /// ```
    /// # use unweight_rt::env::Env;
    /// assert_eq!(Env::unknown(["UNWEIGHT_JTI", "UNWEIGHT_JIT", "PATH"]), ["UNWEIGHT_JTI"]);
    /// ```
    pub fn unknown<S: AsRef<str>>(names: impl IntoIterator<Item = S>) -> Vec<String> {
        names
            .into_iter()
            .filter(|name| {
                let name = name.as_ref();
                name.starts_with("UNWEIGHT_") && VARIABLES.iter().all(|variable| variable.name != name)
            })
            .map(|name| name.as_ref().to_owned())
            .collect()
    }
}

impl SearchPaths {
    fn parse(get: &impl Fn(&str) -> Option<OsString>) -> SearchPaths {
        let list = |name: &str| -> Vec<PathBuf> {
            get(name).map_or_else(Vec::new, |value| {
                std::env::split_paths(&value).filter(|path| path.is_absolute()).collect()
            })
        };
        let path = |name: &str| get(name).map(PathBuf::from);
        let mut python_prefixes: Vec<PathBuf> = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(path).collect();
        for folder in list("PATH") {
            // `<prefix>/bin/python3` belongs to `<prefix>`, and so does the target of a symlink there (a virtual
            // environment used without activation).
            if folder.ends_with("bin") && folder.join("python3").exists() {
                python_prefixes.extend(folder.parent().map(Path::to_owned));
                if let Ok(real) = folder.join("python3").canonicalize() {
                    python_prefixes.extend(real.parent().and_then(Path::parent).map(Path::to_owned));
                }
            }
            // pyenv puts scripts there; a file in the same directory contains the version that they run.
            if folder.ends_with("shims")
                && folder.join("python3").exists()
                && let Some(root) = folder.parent()
            {
                let versions = get("PYENV_VERSION")
                    .and_then(|value| value.into_string().ok())
                    .or_else(|| std::fs::read_to_string(root.join("version")).ok());
                for version in versions.iter().flat_map(|text| text.split([':', '\n'])) {
                    let version = version.trim();
                    if !version.is_empty() && !version.contains('/') {
                        python_prefixes.push(root.join("versions").join(version));
                    }
                }
            }
        }
        // The user's own packages.
        python_prefixes.extend(path("HOME").map(|home| home.join(".local")));
        let mut toolkits: Vec<PathBuf> = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(path).collect();
        toolkits.push(PathBuf::from("/usr/local/cuda"));
        SearchPaths {
            python_prefixes: unique(python_prefixes),
            python_path: list("PYTHONPATH"),
            toolkits: unique(toolkits),
            loader_path: list("LD_LIBRARY_PATH"),
        }
    }
}

fn unique(paths: Vec<PathBuf>) -> Vec<PathBuf> {
    let mut distinct: Vec<PathBuf> = Vec::with_capacity(paths.len());
    for path in paths {
        if !distinct.contains(&path) {
            distinct.push(path);
        }
    }
    distinct
}

fn bad(name: &'static str, value: &str) -> EnvError {
    let expected =
        VARIABLES.iter().find(|variable| variable.name == name).map_or("another value", |variable| variable.values);
    EnvError { name, value: value.to_owned(), expected }
}

fn parsed<T>(
    get: &impl Fn(&str) -> Option<OsString>,
    name: &'static str,
    default: T,
    parse: impl Fn(&str) -> Option<T>,
) -> Result<T, EnvError> {
    match get(name) {
        None => Ok(default),
        Some(value) => {
            value.to_str().and_then(|text| parse(text.trim())).ok_or_else(|| bad(name, &value.to_string_lossy()))
        }
    }
}

/// Parses a size such as `"512M"` to bytes; suffixes are powers of 1024.
fn parse_bytes(text: &str) -> Option<u64> {
    let (digits, shift) = match text.as_bytes().last()? {
        b'K' | b'k' => (&text[..text.len() - 1], 10),
        b'M' | b'm' => (&text[..text.len() - 1], 20),
        b'G' | b'g' => (&text[..text.len() - 1], 30),
        _ => (text, 0),
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(pairs: &[(&str, &str)]) -> Result<Env, EnvError> {
        Env::parse(|name| pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| OsString::from(value)))
    }

    #[test]
    fn defaults_and_values() {
        let env = with(&[("HOME", "/home/u")]).unwrap();
        assert_eq!(env.cache_dir.as_deref(), Some(Path::new("/home/u/.cache/unweight")));
        assert_eq!((env.jit, env.cache_max_bytes), (JitMode::Auto, 1 << 30));
        let env = with(&[
            ("HOME", "/home/u"),
            ("XDG_CACHE_HOME", "/x"),
            ("UNWEIGHT_JIT", "cache-only"),
            ("UNWEIGHT_CACHE_MAX", "3M"),
            ("UNWEIGHT_LOCK_SECONDS", "0"),
            ("UNWEIGHT_JIT_THREADS", "3"),
            ("UNWEIGHT_NVRTC", ""),
        ])
        .unwrap();
        assert_eq!(env.cache_dir.as_deref(), Some(Path::new("/x/unweight")));
        assert_eq!(env.jit, JitMode::CacheOnly);
        assert_eq!(env.cache_max_bytes, 3 << 20);
        assert_eq!(env.lock_timeout, Duration::ZERO);
        assert_eq!(env.jit_threads, 3);
        assert_eq!(env.nvrtc, None);
        assert_eq!(with(&[]).unwrap().cache_dir, None);
        // A relative XDG path is ignored; a relative `UNWEIGHT_CACHE_DIR` is an error.
        assert_eq!(with(&[("XDG_CACHE_HOME", "rel")]).unwrap().cache_dir, None);
    }

    #[test]
    fn a_wrong_value_names_the_variable_and_what_it_may_hold() {
        for (name, value) in [
            ("UNWEIGHT_JIT", "on"),
            ("UNWEIGHT_CACHE_MAX", "lots"),
            ("UNWEIGHT_CACHE_MAX", "99999999999G"),
            ("UNWEIGHT_JIT_THREADS", "0"),
            ("UNWEIGHT_LOCK_SECONDS", "3601"),
            ("UNWEIGHT_CACHE_DIR", "rel/ative"),
        ] {
            let error = with(&[(name, value)]).unwrap_err();
            let text = error.to_string();
            let row = VARIABLES.iter().find(|row| row.name == name).unwrap();
            assert!(text.contains(name) && text.contains(value) && text.contains(row.values), "{text}");
        }
    }

    #[test]
    fn the_table_is_sorted_and_complete() {
        assert!(VARIABLES.windows(2).all(|pair| pair[0].name < pair[1].name));
        // The parser reads every variable of the table, and no other variable of ours.
        let requested = std::cell::RefCell::new(std::collections::BTreeSet::new());
        Env::parse(|name| {
            requested.borrow_mut().insert(name.to_owned());
            None
        })
        .unwrap();
        let own_names: Vec<_> =
            requested.into_inner().into_iter().filter(|name| name.starts_with("UNWEIGHT_")).collect();
        assert_eq!(own_names, VARIABLES.iter().map(|row| row.name).collect::<Vec<_>>());
    }

    #[test]
    fn the_documented_table_is_this_table() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/reference/environment.md");
        let document = std::fs::read_to_string(&path).unwrap();
        let documented: Vec<&str> = document.lines().filter(|line| line.starts_with("| `UNWEIGHT_")).collect();
        let coded: Vec<String> = VARIABLES
            .iter()
            .map(|row| format!("| `{}` | {} | {} | {} |", row.name, row.values, row.default, row.meaning))
            .collect();
        assert_eq!(documented, coded, "docs/reference/environment.md and env::VARIABLES differ");
    }
}
