//! A compiler wrapper for releases, whose output does not depend on the folder of the build.
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
pub const NAME_OF_ROOT: &str = "/unweight";

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
    let own = env::var_os("CARGO_MANIFEST_DIR").is_some_and(|folder| Path::new(&folder).starts_with(root));
    let variable = |name| env::var(name).unwrap_or_default();
    let package = own.then(|| format!("{}-{}", variable("CARGO_PKG_NAME"), variable("CARGO_PKG_VERSION")));
    let library = variable(LIBRARY);
    let (sources, name) = library.split_once('=').unwrap_or_default();
    let folders = [
        (sources.into(), name),
        (home_of_cargo(), "/cargo"),
        (env::var_os("CARGO_TARGET_DIR").unwrap_or_default(), "/target"),
        (root.to_owned(), NAME_OF_ROOT),
    ];
    let status = Command::new(rustc).args(placeless(arguments, package.as_deref(), &folders)).status();
    let status = status.map_err(|error| format!("{}: {error}", rustc.display()))?;
    Ok(status.code().unwrap_or(1))
}

fn home_of_cargo() -> OsString {
    let default = || Some(Path::new(&env::var_os("HOME")?).join(".cargo").into_os_string());
    env::var_os("CARGO_HOME").or_else(default).unwrap_or_default()
}

/// Returns the arguments without the paths of `folders`. Cargo identifies packages outside a workspace by their folder,
/// such as the workspace's crates in the build of the Python extension. The name of `package` replaces this folder.
fn placeless(arguments: &[OsString], package: Option<&str>, folders: &[(OsString, &str)]) -> Vec<OsString> {
    let mut all = arguments.to_vec();
    if !arguments.iter().any(|argument| argument == "--crate-name") {
        return all;
    }
    if let Some(package) = package {
        let kind = arguments.iter().skip_while(|argument| *argument != "--crate-type").nth(1);
        let kind = kind.map_or(String::new(), |kind| kind.to_string_lossy().into_owned());
        for argument in &mut all {
            if argument.as_encoded_bytes().starts_with(b"metadata=") {
                *argument = format!("metadata={package}-{kind}").into();
            }
        }
    }
    // rustc uses the last match.
    for (folder, name) in folders.iter().filter(|(folder, _)| !folder.is_empty()) {
        let mut remap = OsString::from("--remap-path-prefix=");
        remap.push(folder);
        remap.push(format!("={name}"));
        all.push(remap);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_not_compiled_in() {
        let of = |root: &str, hash: &str| {
            let arguments = ["--crate-name", "a", "--crate-type", "lib", "-C", hash].map(OsString::from);
            placeless(&arguments, Some("a-1.0.0"), &[(root.into(), NAME_OF_ROOT), (OsString::new(), "/cargo")])
        };
        let (one, other) = (of("/one", "metadata=1f"), of("/other", "metadata=2f"));
        assert_eq!(one[..6], other[..6]);
        assert_eq!(one[5], "metadata=a-1.0.0-lib");
        assert_eq!(one[6..], ["--remap-path-prefix=/one=/unweight"]);
    }

    #[test]
    fn packages_of_registries_and_questions_stay() {
        let arguments = ["--crate-name", "a", "-C", "metadata=1f"].map(OsString::from);
        assert_eq!(placeless(&arguments, None, &[]), arguments);
        assert_eq!(placeless(&["-vV".into()], Some("a"), &[("/one".into(), "/")]), ["-vV"]);
    }
}
