//! A compiler wrapper for releases, whose output does not depend on the directory of the build.
//!
//! Cargo runs `xtask rustc ARGUMENTS` instead of `rustc ARGUMENTS` if `RUSTC_WRAPPER` is xtask and [`ROOT`] is set.

use std::{
    env,
    ffi::{OsStr, OsString},
    path::Path,
    process::Command,
};

use crate::run;

/// The environment variable with the workspace root.
pub const ROOT: &str = "UNWEIGHT_DIST_ROOT";
/// The environment variable with `FROM=TO`: where the standard library's sources are, if installed, and which path its
/// panic messages state.
pub const LIBRARY: &str = "UNWEIGHT_DIST_LIBRARY";
/// Replaces [`ROOT`] in panic messages.
pub const ROOT_NAME: &str = "/unweight";

/// Returns the value for [`LIBRARY`].
pub fn library() -> Result<String, String> {
    let sysroot = run::output(Command::new("rustc").args(["--print", "sysroot"]))?;
    let version = run::output(Command::new("rustc").arg("-vV"))?;
    let commit = version.lines().find_map(|line| line.strip_prefix("commit-hash: ")).unwrap_or("unknown");
    Ok(format!("{sysroot}/lib/rustlib/src/rust=/rustc/{commit}"))
}

/// Runs the compiler and returns its exit status.
pub fn run(root: &OsStr, arguments: &[OsString]) -> Result<i32, String> {
    let (rustc, arguments) = arguments.split_first().ok_or("no compiler to run")?;
    let is_workspace_package =
        env::var_os("CARGO_MANIFEST_DIR").is_some_and(|directory| Path::new(&directory).starts_with(root));
    let variable = |name| env::var(name).unwrap_or_default();
    let package =
        is_workspace_package.then(|| format!("{}-{}", variable("CARGO_PKG_NAME"), variable("CARGO_PKG_VERSION")));
    let library = variable(LIBRARY);
    let (sources, name) = library.split_once('=').unwrap_or_default();
    let directories = [
        (sources.into(), name),
        (cargo_home(), "/cargo"),
        (env::var_os("CARGO_TARGET_DIR").unwrap_or_default(), "/target"),
        (root.to_owned(), ROOT_NAME),
    ];
    let status = Command::new(rustc).args(remap_directories(arguments, package.as_deref(), &directories)).status();
    let status = status.map_err(|error| format!("{}: {error}", rustc.display()))?;
    Ok(status.code().unwrap_or(1))
}

fn cargo_home() -> OsString {
    let default = || Some(Path::new(&env::var_os("HOME")?).join(".cargo").into_os_string());
    env::var_os("CARGO_HOME").or_else(default).unwrap_or_default()
}

/// Returns the arguments without the paths of `directories`. Cargo identifies packages outside a workspace by their
/// directory, such as the workspace's crates in the build of the Python extension. The name of `package` replaces this
/// directory.
fn remap_directories(arguments: &[OsString], package: Option<&str>, directories: &[(OsString, &str)]) -> Vec<OsString> {
    let mut remapped = arguments.to_vec();
    if !arguments.iter().any(|argument| argument == "--crate-name") {
        return remapped;
    }
    if let Some(package) = package {
        let kind = arguments.iter().skip_while(|argument| *argument != "--crate-type").nth(1);
        let kind = kind.map_or(String::new(), |kind| kind.to_string_lossy().into_owned());
        for argument in &mut remapped {
            if argument.as_encoded_bytes().starts_with(b"metadata=") {
                *argument = format!("metadata={package}-{kind}").into();
            }
        }
    }
    // rustc uses the last match.
    for (directory, name) in directories.iter().filter(|(directory, _)| !directory.is_empty()) {
        let mut remap = OsString::from("--remap-path-prefix=");
        remap.push(directory);
        remap.push(format!("={name}"));
        remapped.push(remap);
    }
    remapped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn build_folders_are_not_compiled_in() {
        let remapped = |root: &str, hash: &str| {
            let arguments = ["--crate-name", "a", "--crate-type", "lib", "-C", hash].map(OsString::from);
            remap_directories(&arguments, Some("a-1.0.0"), &[(root.into(), ROOT_NAME), (OsString::new(), "/cargo")])
        };
        let (one, other) = (remapped("/one", "metadata=1f"), remapped("/other", "metadata=2f"));
        assert_eq!(one[..6], other[..6]);
        assert_eq!(one[5], "metadata=a-1.0.0-lib");
        assert_eq!(one[6..], ["--remap-path-prefix=/one=/unweight"]);
    }

    #[test]
    fn registry_packages_and_version_queries_are_unchanged() {
        let arguments = ["--crate-name", "a", "-C", "metadata=1f"].map(OsString::from);
        assert_eq!(remap_directories(&arguments, None, &[]), arguments);
        assert_eq!(remap_directories(&["-vV".into()], Some("a"), &[("/one".into(), "/")]), ["-vV"]);
    }
}
