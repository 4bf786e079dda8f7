//! Reads the manifest of a directory, or finds out why there is none.

use std::{io, path::Path};

use super::{
    BundleError, files,
    manifest::{self, Manifest},
    part_file::PartFile,
    stage,
};

/// Reads and checks `unweight.json`.
pub(crate) fn read_manifest(dir: &Path) -> Result<Manifest, BundleError> {
    Ok(read_manifest_bytes(dir)?.0)
}

/// Like [`read_manifest`], with the bytes that were parsed.
pub(crate) fn read_manifest_bytes(dir: &Path) -> Result<(Manifest, Vec<u8>), BundleError> {
    match dir.metadata() {
        Ok(metadata) if metadata.is_dir() => {}
        Ok(_) => return Err(BundleError::NotADirectory { path: dir.into() }),
        Err(error) => {
            return Err(match stage::partial_of(dir).filter(|partial| stage::is_begun(partial)) {
                Some(partial) if error.kind() == io::ErrorKind::NotFound => {
                    BundleError::Unfinished { path: dir.into(), partial }
                }
                _ => BundleError::io("open the bundle", dir)(error),
            });
        }
    }
    let path = dir.join(manifest::FILE_NAME);
    if !path.exists() {
        return Err(match PartFile::read(dir)? {
            Some(part) => BundleError::NotMerged { path: dir.into(), part: part.part() },
            None => match stage::output_of(dir).filter(|_| stage::is_begun(dir)) {
                Some(path) => BundleError::Unfinished { path, partial: dir.into() },
                None => BundleError::NotABundle { path: dir.into() },
            },
        });
    }
    let bytes = files::read_small(&path, manifest::BYTES_MAX)?;
    let manifest = Manifest::parse(&bytes, Path::new(manifest::FILE_NAME))?;
    Ok((manifest, bytes))
}
