//! The tensors of a model, in the files of a directory or in a bundle.

use std::{
    collections::{HashMap, HashSet},
    path::{Path, PathBuf},
};

use unweight_format::{
    Digest,
    bundle::{self, Bundle, manifest},
    raw::Input,
    safetensors::{Dtype, Header, SOURCE_HEADER_MAX, TensorInfo},
};

use super::ConvertError;

/// Suffixes of the names of weights files and of their indexes.
pub(super) const WEIGHTS_END: &str = ".safetensors";
pub(super) const INDEX_END: &str = ".safetensors.index.json";

/// A safetensors file.
#[derive(Debug)]
pub(super) struct WeightsFile {
    pub(super) path: PathBuf,
    pub(super) input: Input,
    pub(super) header: Header,
}

impl WeightsFile {
    pub(super) fn open(path: &Path) -> Result<Self, ConvertError> {
        let input = Input::open(path)?;
        let header = Header::read(input.reader(), input.bytes(), SOURCE_HEADER_MAX);
        let header = header.map_err(|source| bundle::BundleError::Io {
            action: "read the header",
            path: path.into(),
            source,
        })?;
        let (header, _) = header.map_err(|source| bundle::BundleError::Header { path: path.into(), source })?;
        Ok(Self { path: path.into(), input, header })
    }
}

/// The files of a directory.
pub(super) struct Directory {
    pub(super) weights: Vec<WeightsFile>,
    /// Names and paths of all other files, except indexes.
    pub(super) others: Vec<(String, PathBuf)>,
}

impl Directory {
    /// Opens all weights files. Tensor names must be unique.
    pub(super) fn open(root: &Path) -> Result<Self, ConvertError> {
        let (weights, others): (Vec<_>, Vec<_>) =
            unweight_format::raw::walk(root)?.into_iter().partition(|(name, _)| name.ends_with(WEIGHTS_END));
        let weights = weights.iter().map(|(_, path)| WeightsFile::open(path)).collect::<Result<Vec<_>, _>>()?;
        let mut seen = HashSet::new();
        for file in &weights {
            if let Some(tensor) = file.header.tensors.iter().find(|tensor| !seen.insert(&tensor.name)) {
                return Err(ConvertError::Twice { path: file.path.clone(), tensor: tensor.name.clone() });
            }
        }
        let others = others.into_iter().filter(|(name, _)| !name.ends_with(INDEX_END)).collect();
        Ok(Self { weights, others })
    }

    /// Returns every tensor by its name.
    pub(super) fn by_name(&self) -> HashMap<&str, (&WeightsFile, &TensorInfo)> {
        self.weights
            .iter()
            .flat_map(|file| file.header.tensors.iter().map(move |tensor| (tensor.name.as_str(), (file, tensor))))
            .collect()
    }
}

/// A tensor of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Tensor {
    pub(super) name: String,
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<usize>,
    pub(super) bytes: u64,
    /// Index of the file in the directory.
    file: usize,
    offset: u64,
}

/// A model in a directory or a bundle.
pub(super) struct Model {
    pub(super) tensors: Vec<Tensor>,
    origin: Origin,
}

enum Origin {
    Directory(Directory),
    Bundle(Box<Bundle>),
}

impl Model {
    /// Opens a model directory or a bundle.
    pub(super) fn open(root: &Path) -> Result<Self, ConvertError> {
        if root.join(manifest::FILE_NAME).is_file() {
            return Self::of_bundle(Bundle::open(root)?);
        }
        let directory = Directory::open(root)?;
        if directory.weights.is_empty() {
            return Err(bundle::BundleError::NoWeights { path: root.into() }.into());
        }
        let files = directory.weights.iter().enumerate();
        let tensors = files.flat_map(|(file, weights)| {
            weights.header.tensors.iter().map(move |tensor| Tensor {
                name: tensor.name.clone(),
                dtype: tensor.dtype,
                shape: tensor.shape.clone(),
                bytes: tensor.bytes,
                file,
                offset: tensor.offset,
            })
        });
        Ok(Self { tensors: tensors.collect(), origin: Origin::Directory(directory) })
    }

    fn of_bundle(bundle: Bundle) -> Result<Self, ConvertError> {
        let tensors: Vec<Tensor> = bundle
            .tensors()
            .map(|tensor| Tensor {
                name: tensor.entry().name.clone(),
                dtype: tensor.entry().dtype,
                shape: tensor.entry().shape.clone(),
                bytes: tensor.entry().original_bytes().unwrap_or(0),
                file: 0,
                offset: 0,
            })
            .collect();
        let mut seen = HashSet::new();
        if let Some(tensor) = bundle.tensors().find(|tensor| !seen.insert(&tensor.entry().name)) {
            return Err(ConvertError::Twice { path: tensor.file().into(), tensor: tensor.entry().name.clone() });
        }
        Ok(Self { tensors, origin: Origin::Bundle(Box::new(bundle)) })
    }

    /// Passes the bytes of a tensor to `each`, in order and in pieces of whole elements; returns their digest.
    pub(super) fn stream(
        &self,
        tensor: &Tensor,
        mut each: impl FnMut(&[u8]) -> Result<(), bundle::BundleError>,
    ) -> Result<Digest, ConvertError> {
        Ok(match &self.origin {
            Origin::Directory(directory) => {
                directory.weights[tensor.file].input.stream(tensor.offset, tensor.bytes, each)?
            }
            Origin::Bundle(bundle) => {
                let bytes = bundle.tensor(&tensor.name)?.decode()?;
                each(&bytes)?;
                Digest::of(&bytes)
            }
        })
    }

    /// Returns the error for a tensor whose bytes have changed since they were read.
    pub(super) fn changed(&self, tensor: &Tensor) -> ConvertError {
        match &self.origin {
            Origin::Directory(directory) => directory.weights[tensor.file].input.changed().into(),
            Origin::Bundle(_) => {
                bundle::BundleError::SourceChanged { path: tensor.name.clone().into(), change: "it was written to" }
                    .into()
            }
        }
    }

    /// Returns the names of the files next to the weights.
    pub(super) fn others(&self) -> Vec<String> {
        match &self.origin {
            Origin::Directory(directory) => directory.others.iter().map(|(name, _)| name.clone()).collect(),
            Origin::Bundle(bundle) => {
                let files = bundle.manifest().files.iter();
                let others = files
                    .filter(|file| !matches!(file, manifest::FileEntry::Weights(_) | manifest::FileEntry::Index(_)));
                others.map(|file| file.name().to_owned()).collect()
            }
        }
    }

    /// Reads a small file next to the weights.
    pub(super) fn read(&self, name: &str, limit: u64) -> Result<Option<Vec<u8>>, ConvertError> {
        match &self.origin {
            Origin::Directory(directory) => {
                let Some((_, path)) = directory.others.iter().find(|(other, _)| other == name) else { return Ok(None) };
                let input = Input::open(path)?;
                let got = input.bytes();
                if got > limit {
                    return Err(bundle::BundleError::TooLarge { path: path.clone(), limit, got }.into());
                }
                Ok(Some(input.read(0, got)?))
            }
            Origin::Bundle(bundle) => Ok(bundle.copied(name, limit)?),
        }
    }

    /// Copies a file next to the weights to the output.
    pub(super) fn copy(
        &self,
        name: &str,
        output: &unweight_format::raw::OutputDir,
        progress: &dyn bundle::Progress,
    ) -> Result<(), ConvertError> {
        match &self.origin {
            Origin::Directory(directory) => {
                let path = directory.others.iter().find(|(other, _)| other == name).map(|(_, path)| path);
                path.map_or(Ok(()), |path| output.copy(path, name, progress)).map_err(Into::into)
            }
            Origin::Bundle(bundle) => {
                let file = output.create(name)?;
                let (mut at, mut failed) = (0, None);
                let mut writer = Writer(|bytes: &[u8]| match file.write_at(bytes, at) {
                    Ok(()) => {
                        at += bytes.len() as u64;
                        Ok(())
                    }
                    Err(error) => {
                        failed = Some(error);
                        Err(std::io::Error::other("not written"))
                    }
                });
                let written = bundle.write_file(name, &mut writer, &bundle::DecompressOptions::default(), progress);
                if let Some(failed) = failed {
                    return Err(failed.into());
                }
                written?;
                Ok(file.finish(None)?)
            }
        }
    }
}

/// A writer that calls a function.
struct Writer<F>(F);

impl<F: FnMut(&[u8]) -> std::io::Result<()>> std::io::Write for Writer<F> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        (self.0)(bytes).map(|()| bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Returns the header of a safetensors file as the reference library writes it: `__metadata__` if there is any, the
/// tensors `(name, dtype, shape, bytes)` in the order of their data, and spaces up to a multiple of 8 bytes.
pub(super) fn header<'a>(
    metadata: &[(&str, &str)],
    tensors: impl Iterator<Item = (&'a str, Dtype, &'a [usize], u64)>,
) -> Vec<u8> {
    let string = |text: &str| serde_json::Value::from(text).to_string();
    let mut members = Vec::new();
    if !metadata.is_empty() {
        let pairs: Vec<String> =
            metadata.iter().map(|(key, value)| format!("{}:{}", string(key), string(value))).collect();
        members.push(format!("\"__metadata__\":{{{}}}", pairs.join(",")));
    }
    let mut begin = 0u64;
    for (name, dtype, shape, bytes) in tensors {
        let shape: Vec<String> = shape.iter().map(ToString::to_string).collect();
        let end = begin + bytes;
        members.push(format!(
            "{}:{{\"dtype\":\"{dtype}\",\"shape\":[{}],\"data_offsets\":[{begin},{end}]}}",
            string(name),
            shape.join(",")
        ));
        begin = end;
    }
    let mut text = format!("{{{}}}", members.join(","));
    text.extend(std::iter::repeat_n(' ', text.len().next_multiple_of(8) - text.len()));
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}
