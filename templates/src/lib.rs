//! The CUDA side of Unweight as data: device headers and kernel templates, embedded in the binary.
//!
//! This crate owns the *files* and knows nothing of what is in them: it does not render, compile or check.
//! `unweight-codegen` renders the templates; `unweight-rt` compiles the result.
//!
//! ```text
//! include/unweight/**.cuh   plain CUDA C++ without system headers       headers(), header(name)
//! kernels/kernel.cu.tera    the entry point of every kernel               kernels(), kernel(name)
//! ```
//!
//! The contract between a template and its context stands in `README.md` next to the files.

include!(concat!(env!("OUT_DIR"), "/embedded.rs"));

/// All headers as `(name, text)`, sorted by name; a name is what `#include "..."` says, such as `unweight/abi.cuh`.
pub fn headers() -> &'static [(&'static str, &'static str)] {
    HEADERS
}

/// The text of one header.
///
/// ```
/// let abi = unweight_templates::header("unweight/abi.cuh").unwrap();
/// assert!(abi.contains("struct DecodeHuffmanArgs"));
/// assert_eq!(unweight_templates::header("unweight/none.cuh"), None);
/// ```
pub fn header(name: &str) -> Option<&'static str> {
    find(HEADERS, name)
}

/// All kernel templates as `(name, text)`, sorted by name; a name is a file name, `kernel.cu.tera`.
pub fn kernels() -> &'static [(&'static str, &'static str)] {
    KERNELS
}

/// The text of one kernel template.
///
/// ```
/// assert!(unweight_templates::kernel("kernel.cu.tera").is_some());
/// ```
pub fn kernel(name: &str) -> Option<&'static str> {
    find(KERNELS, name)
}

fn find(list: &'static [(&'static str, &'static str)], name: &str) -> Option<&'static str> {
    // The lists are sorted by the build script.
    list.binary_search_by_key(&name, |(known, _)| known).ok().map(|index| list[index].1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_sorted_and_found_by_name() {
        for list in [headers(), kernels()] {
            assert!(!list.is_empty());
            assert!(list.windows(2).all(|pair| pair[0].0 < pair[1].0));
            for (name, text) in list {
                assert_eq!(find(list, name), Some(*text));
            }
        }
    }

    #[test]
    fn every_file_of_the_package_is_embedded() {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
        for (folder, list) in [("include", headers()), ("kernels", kernels())] {
            let mut folders = vec![root.join(folder)];
            let mut count = 0;
            while let Some(folder) = folders.pop() {
                for entry in std::fs::read_dir(folder).unwrap() {
                    let path = entry.unwrap().path();
                    if path.is_dir() { folders.push(path) } else { count += 1 }
                }
            }
            assert_eq!(count, list.len(), "a file in templates/{folder} has an extension that build.rs does not list");
        }
    }
}
