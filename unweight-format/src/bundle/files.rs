//! Files: mapped for reading, copied with their digests, walked by relative name.

use std::{
    fs::{self, File},
    io::{Read, Write},
    ops::Range,
    path::{Path, PathBuf},
};

use memmap2::{Mmap, UncheckedAdvice};
use sha2::{Digest as _, Sha256};

use super::BundleError;
use crate::{Digest, bundle::manifest, digest::Digester};

/// Bytes moved at a time.
const CHUNK: usize = 4 << 20;

/// A file mapped for reading.
///
/// The mapping follows the file: a process that truncates it while it is mapped ends this one with SIGBUS. Weights are not
/// written to while they are read; [`Mapped::check_unchanged`] notices when they were.
#[derive(Debug)]
pub(crate) struct Mapped {
    map: Mmap,
    path: PathBuf,
}

impl Mapped {
    /// Maps a file that must have `bytes` bytes.
    pub(crate) fn open(path: &Path, bytes: u64) -> Result<Self, BundleError> {
        let file = File::open(path).map_err(BundleError::io("open the file", path))?;
        // SAFETY: the map is only read, and only as bytes; see the type's note on truncation.
        let map = unsafe { Mmap::map(&file) }.map_err(BundleError::io("map the file", path))?;
        if map.len() as u64 != bytes {
            return Err(BundleError::SourceChanged { path: path.into(), expected: bytes, got: map.len() as u64 });
        }
        Ok(Self { map, path: path.into() })
    }

    /// Bytes `offset..offset + bytes`; the caller has checked them against the file's size.
    pub(crate) fn slice(&self, offset: u64, bytes: u64) -> &[u8] {
        &self.map[offset as usize..(offset + bytes) as usize]
    }

    /// Gives the memory of these bytes back; they are read from the file again when touched.
    pub(crate) fn release(&self, range: Range<u64>) {
        let (offset, bytes) = (range.start as usize, range.end.saturating_sub(range.start) as usize);
        if bytes > 0 {
            // SAFETY: the pages of a shared read-only map of a file; their contents are those of the file before and after.
            let advised = unsafe { self.map.unchecked_advise_range(UncheckedAdvice::DontNeed, offset, bytes) };
            // Only memory is at stake.
            _ = advised;
        }
    }

    /// Fails if the file has another size by now.
    pub(crate) fn check_unchanged(&self) -> Result<(), BundleError> {
        let got = fs::metadata(&self.path).map_err(BundleError::io("look at the file", &self.path))?.len();
        let expected = self.map.len() as u64;
        if got == expected {
            Ok(())
        } else {
            Err(BundleError::SourceChanged { path: self.path.clone(), expected, got })
        }
    }
}

/// What was read of a whole file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Contents {
    pub(crate) bytes: u64,
    pub(crate) digest: Digest,
    pub(crate) sha256: Option<String>,
}

/// Reads all of a file; `each` gets every chunk, in order.
pub(crate) fn read_through(
    path: &Path,
    sha256: bool,
    mut each: impl FnMut(&[u8]) -> Result<(), BundleError>,
) -> Result<Contents, BundleError> {
    let mut file = File::open(path).map_err(BundleError::io("open the file", path))?;
    let (mut digester, mut sha, mut bytes) = (Digester::default(), sha256.then(Sha256::new), 0);
    let mut chunk = vec![0; CHUNK];
    loop {
        let got = file.read(&mut chunk).map_err(BundleError::io("read the file", path))?;
        if got == 0 {
            break;
        }
        digester.update(&chunk[..got]);
        if let Some(sha) = &mut sha {
            sha.update(&chunk[..got]);
        }
        each(&chunk[..got])?;
        bytes += got as u64;
    }
    Ok(Contents { bytes, digest: digester.finish(), sha256: sha.map(hex) })
}

/// SHA-256 of a file, as 64 digits.
pub(crate) fn sha256(path: &Path) -> Result<String, BundleError> {
    let mut file = File::open(path).map_err(BundleError::io("open the file", path))?;
    let (mut sha, mut chunk) = (Sha256::new(), vec![0; CHUNK]);
    loop {
        match file.read(&mut chunk).map_err(BundleError::io("read the file", path))? {
            0 => return Ok(hex(sha)),
            got => sha.update(&chunk[..got]),
        }
    }
}

fn hex(sha: Sha256) -> String {
    sha.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Reads a file of at most `limit` bytes.
pub(crate) fn read_small(path: &Path, limit: u64) -> Result<Vec<u8>, BundleError> {
    let file = File::open(path).map_err(BundleError::io("open the file", path))?;
    let mut bytes = Vec::new();
    file.take(limit + 1).read_to_end(&mut bytes).map_err(BundleError::io("read the file", path))?;
    if bytes.len() as u64 > limit {
        let source = std::io::Error::other(format!("it has more than {limit} bytes"));
        return Err(BundleError::Io { action: "read the file", path: path.into(), source });
    }
    Ok(bytes)
}

/// Writes a file and waits until it is on the disk.
pub(crate) fn write_durably(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

/// Waits until a directory's entries are on the disk.
pub(crate) fn sync_dir(path: &Path) -> Result<(), BundleError> {
    File::open(path).and_then(|dir| dir.sync_all()).map_err(BundleError::io("sync the directory", path))
}

/// Every file below `root`: relative names with `/`, sorted, symbolic links followed.
pub(crate) fn walk(root: &Path) -> Result<Vec<(String, PathBuf)>, BundleError> {
    if !fs::metadata(root).map_err(BundleError::io("look at the directory", root))?.is_dir() {
        return Err(BundleError::NotADirectory { path: root.into() });
    }
    let mut found = Vec::new();
    walk_into(root, "", &mut Vec::new(), &mut found)?;
    found.sort();
    Ok(found)
}

fn walk_into(
    dir: &Path,
    prefix: &str,
    above: &mut Vec<PathBuf>,
    found: &mut Vec<(String, PathBuf)>,
) -> Result<(), BundleError> {
    let real = dir.canonicalize().map_err(BundleError::io("follow the path", dir))?;
    if above.contains(&real) {
        return Err(BundleError::Unstorable { path: dir.into(), reason: "a loop of symbolic links; remove it" });
    }
    above.push(real);
    for entry in fs::read_dir(dir).map_err(BundleError::io("list the directory", dir))? {
        let path = entry.map_err(BundleError::io("list the directory", dir))?.path();
        let unstorable = |reason| BundleError::Unstorable { path: path.clone(), reason };
        let name =
            path.file_name().and_then(|name| name.to_str()).ok_or_else(|| unstorable("its name is not UTF-8"))?;
        let name = format!("{prefix}{name}");
        manifest::check_name(&name).map_err(unstorable)?;
        let metadata = fs::metadata(&path).map_err(BundleError::io("look at the file", &path))?;
        if metadata.is_dir() {
            if is_weights(&name) {
                return Err(unstorable("a directory with the name of a weights file; rename it"));
            }
            walk_into(&path, &format!("{name}/"), above, found)?;
        } else if metadata.is_file() {
            found.push((name, path));
        } else {
            return Err(unstorable("neither a file nor a directory; move it away"));
        }
    }
    above.pop();
    Ok(())
}

/// True for names of safetensors files.
pub(crate) fn is_weights(name: &str) -> bool {
    name.ends_with(".safetensors")
}

/// True for names of safetensors indexes.
pub(crate) fn is_index(name: &str) -> bool {
    name.ends_with(".safetensors.index.json")
}
