use super::*;
use crate::{
    CompressedTensor,
    manifest::{Manifest, TensorEntry},
};
use std::path::{Path, PathBuf};
/// An open bundle.
#[derive(Debug)]
pub struct Bundle {
    dir: PathBuf,
    manifest: Manifest,
}
/// A tensor of a bundle.
#[derive(Debug, Clone, Copy)]
pub struct BundleTensor<'a> {
    /// File it is in.
    pub file: &'a str,
    /// What the manifest says about it.
    pub entry: &'a TensorEntry,
}
impl Bundle {
    /// Opens a bundle: manifest, sizes and headers of all shards are checked.
    pub fn open(dir: &Path) -> Result<Self, BundleError> {
        Err(BundleError::NotADirectory { path: dir.into() })
    }
    /// The manifest.
    pub fn manifest(&self) -> &Manifest {
        let _ = &self.dir;
        &self.manifest
    }
    /// A tensor by name.
    pub fn tensor(&self, name: &str) -> Result<CompressedTensor<&[u8]>, BundleError> {
        Err(BundleError::UnknownTensor { name: name.into() })
    }
    /// Every tensor, in file and data order.
    pub fn tensors(&self) -> impl Iterator<Item = BundleTensor<'_>> {
        self.manifest
            .files
            .iter()
            .filter_map(|f| f.weights())
            .flat_map(|f| f.tensors.iter().map(|entry| BundleTensor { file: &f.name, entry }))
    }
}
