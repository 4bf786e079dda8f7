//! Repositories: their names, and the files of a revision.

use std::collections::{BTreeSet, HashMap};

use serde::Deserialize;

use unweight_format::bundle::manifest::FILE_NAME as MANIFEST;

use super::{HubError, client::Client, digest::is_etag, url::encode};

/// Maximum size of a list of files, bytes.
const LIST_MAX: u64 = 64 << 20;
/// Maximum number of files.
const FILES_MAX: usize = 100_000;
/// Ends of the names of files with weights in forms that Unweight does not read.
const OTHER_WEIGHTS: [&str; 13] = [
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".h5",
    ".msgpack",
    ".ot",
    ".onnx",
    ".onnx_data",
    ".gguf",
    ".ggml",
    ".tflite",
    ".mlmodel",
];

/// A repository with a model, at a revision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Repository {
    /// `org/name`.
    pub id: String,
    /// Branch, tag or commit.
    pub revision: String,
}

/// What a command does with a repository.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// Compresses its model.
    Model,
    /// Runs its bundle.
    Bundle,
}

/// A file of a repository.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemoteFile {
    /// Relative path.
    pub name: String,
    /// Size in bytes.
    pub size: u64,
    /// SHA-256 of a file in large-file storage, git's digest of any other.
    pub etag: String,
}

/// The files of a commit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listing {
    /// The commit that the revision names.
    pub commit: String,
    /// The files to fetch.
    pub files: Vec<RemoteFile>,
    /// Names of the files that are not needed.
    pub skipped: Vec<String>,
}

#[derive(Deserialize)]
struct ModelInfo {
    sha: String,
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    #[serde(rename = "blobId")]
    blob: Option<String>,
    lfs: Option<Large>,
}

#[derive(Deserialize)]
struct Large {
    #[serde(alias = "oid")]
    sha256: String,
    size: u64,
}

impl Repository {
    /// Returns the URL path of the repository's API.
    pub(super) fn api(&self, end: &str) -> String {
        format!("/api/models/{}/{end}", self.id)
    }

    /// Returns the URL path of a file.
    pub(super) fn resolve(&self, commit: &str, name: &str) -> String {
        let name: Vec<_> = name.split('/').map(encode).collect();
        format!("/{}/resolve/{}/{}", self.id, encode(commit), name.join("/"))
    }

    /// Lists the files that a command needs, with their sizes and digests.
    ///
    /// # Errors
    /// The server does not answer, has no such repository, refuses access or answers with unusable values; or the
    /// repository does not have what the command needs.
    pub fn list(&self, client: &Client, usage: Use) -> Result<Listing, HubError> {
        self.listing(client, Some(usage))
    }

    /// Lists all files of a repository.
    pub(super) fn list_all(&self, client: &Client) -> Result<Listing, HubError> {
        self.listing(client, None)
    }

    /// Adds the revision to the error of an answer.
    pub(super) fn with_revision(&self, error: HubError) -> HubError {
        match error {
            HubError::NoRevision { what, host, .. } => {
                HubError::NoRevision { what, host, revision: self.revision.clone() }
            }
            other => other,
        }
    }

    /// Whether the revision can be a new branch: no commit, and none of the names that the Hub makes.
    pub(super) fn is_branch(&self) -> bool {
        !is_etag(&self.revision) && self.revision != "refs" && !self.revision.starts_with("refs/")
    }

    fn listing(&self, client: &Client, usage: Option<Use>) -> Result<Listing, HubError> {
        let path = format!("{}?blobs=true", self.api(&format!("revision/{}", encode(&self.revision))));
        let info: ModelInfo = client.json(&self.id, &path, LIST_MAX).map_err(|error| self.with_revision(error))?;
        let invalid = |reason: String| client.invalid(&self.id, reason);
        if !is_etag(&info.sha) {
            return Err(invalid("the commit is not a digest".into()));
        }
        if info.siblings.len() > FILES_MAX {
            return Err(invalid(format!("{} files, limit {FILES_MAX}", info.siblings.len())));
        }
        let mut seen = BTreeSet::new();
        for sibling in &info.siblings {
            check_name(&sibling.rfilename).map_err(|reason| invalid(format!("a file name {reason}")))?;
            if !seen.insert(sibling.rfilename.as_str()) {
                return Err(invalid("a file name occurs twice".into()));
            }
        }
        let skipped = match usage {
            Some(Use::Model) => unneeded(&seen),
            _ => BTreeSet::new(),
        };
        usage.map_or(Ok(()), |usage| self.check_use(&seen, usage))?;
        let mut listing = Listing {
            commit: info.sha,
            files: Vec::new(),
            skipped: skipped.iter().map(|name| (*name).to_owned()).collect(),
        };
        for sibling in info.siblings.iter().filter(|sibling| !skipped.contains(sibling.rfilename.as_str())) {
            let file = self.file(client, &listing.commit, sibling)?;
            listing.files.push(file);
        }
        let mut sizes: HashMap<&str, u64> = HashMap::new();
        for file in &listing.files {
            if *sizes.entry(&file.etag).or_insert(file.size) != file.size {
                return Err(invalid("files with one digest have different sizes".into()));
            }
        }
        if listing.files.iter().try_fold(0u64, |sum, file| sum.checked_add(file.size)).is_none_or(|sum| sum >> 63 != 0)
        {
            return Err(invalid("the sizes of the files exceed 2^63 bytes".into()));
        }
        Ok(listing)
    }

    /// Returns size and etag of a file; asks for them if the list has none.
    fn file(&self, client: &Client, commit: &str, sibling: &Sibling) -> Result<RemoteFile, HubError> {
        let name = sibling.rfilename.clone();
        let (size, etag) = match (&sibling.lfs, sibling.size, &sibling.blob) {
            (Some(large), ..) => (large.size, large.sha256.clone()),
            (None, Some(size), Some(blob)) => (size, blob.clone()),
            _ => client.head(&format!("{}: {name}", self.id), &self.resolve(commit, &name))?,
        };
        if !is_etag(&etag) {
            return Err(client.invalid(&format!("{}: {name}", self.id), "no usable digest of the file".into()));
        }
        Ok(RemoteFile { name, size, etag })
    }

    /// Fails before the download if the repository does not have what the command needs.
    fn check_use(&self, names: &BTreeSet<&str>, usage: Use) -> Result<(), HubError> {
        let id = &self.id;
        let (code, reason) = match (usage, names.contains(MANIFEST)) {
            (Use::Model, true) => (
                "source-is-bundle",
                format!("a bundle, not a model; restore it first: unweight decompress {id} -o DIR"),
            ),
            (Use::Bundle, false) => {
                ("not-a-bundle", format!("a model, not a bundle; compress it first: unweight compress {id} -o DIR"))
            }
            (Use::Model, false) if !names.iter().any(|name| name.ends_with(".safetensors")) => {
                ("no-weights", "the repository has no .safetensors file; choose one that has".to_owned())
            }
            _ => return Ok(()),
        };
        Err(HubError::Unsuitable { what: id.clone(), code, reason })
    }
}

/// Checks that a name stays within the directory of its snapshot.
fn check_name(name: &str) -> Result<(), &'static str> {
    if name.len() > 4096 || name.split('/').any(|part| part.len() > 255) {
        return Err("is too long");
    }
    if name.split('/').any(|part| part.is_empty() || part == "." || part == "..") {
        return Err("leads out of the repository");
    }
    if name.chars().any(|c| c.is_control() || c == '\\') || name.as_bytes().get(1) == Some(&b':') {
        return Err("has a character that paths may not have");
    }
    Ok(())
}

/// Returns the files that a model is not loaded from: weights in other forms, and Mistral's second copy of them.
fn unneeded<'a>(names: &BTreeSet<&'a str>) -> BTreeSet<&'a str> {
    let has_model = ["model.safetensors", "model.safetensors.index.json"].iter().any(|name| names.contains(name));
    let is_copy = |name: &str| has_model && name.starts_with("consolidated") && name.ends_with(".safetensors");
    let of_other = |name: &str| OTHER_WEIGHTS.iter().any(|end| name.ends_with(end));
    let of_index = |name: &str| name.strip_suffix(".index.json").is_some_and(of_other);
    names.iter().copied().filter(|name| of_other(name) || of_index(name) || is_copy(name)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stay_within_the_snapshot() {
        for name in ["a", "a/b.json", "..a", "a..b/c", ".gitattributes", "ü.txt", "a b"] {
            assert_eq!(check_name(name), Ok(()), "{name}");
        }
        let long = "x".repeat(256);
        for name in
            ["", "/etc/passwd", "../a", "a/../b", "a/..", "a//b", ".", "a/.", "a\\b", "c:/a", "a\nb", "a/", &long]
        {
            assert!(check_name(name).is_err(), "{name}");
        }
    }

    #[test]
    fn other_forms_of_weights_are_not_needed() {
        let names = [
            "config.json",
            "consolidated.safetensors",
            "model-00001-of-00001.safetensors",
            "model.safetensors.index.json",
            "onnx/model.onnx",
            "original/consolidated.00.pth",
            "pytorch_model.bin",
            "pytorch_model.bin.index.json",
            "tokenizer.json",
        ];
        let unneeded: Vec<_> = unneeded(&names.into()).into_iter().collect();
        assert_eq!(unneeded, [names[1], names[4], names[5], names[6], names[7]]);
        let alone = ["consolidated.safetensors"].into();
        assert!(super::unneeded(&alone).is_empty());
    }

    #[test]
    fn urls_are_encoded() {
        let repository = Repository { id: "org/name".into(), revision: "refs/pr/1".into() };
        assert_eq!(repository.resolve("abc", "a b/ü#?.json"), "/org/name/resolve/abc/a%20b/%C3%BC%23%3F.json");
    }
}
