//! Converts a DFloat11 directory to a plain BF16 model, bit by bit.
//!
//! ```text
//! model_layers_0.safetensors, ...  --units decoded, a few blocks at a time-->  model-00001-of-0000N.safetensors, ...
//!                                                                              model.safetensors.index.json
//! config.json                      --without dfloat11_config-->                config.json
//! everything else                  --copied-->
//! ```
//! The format does not store the shapes of weights. They follow from `config.json` and from the role of a weight, which
//! its name determines.

use std::{
    collections::{HashMap, HashSet},
    fs,
    path::Path,
};

use serde::Serialize;
use unweight_format::{
    Role,
    bundle::Progress,
    raw::{Digester, Input, OutputDir, roles},
    safetensors::{Dtype, TensorInfo},
};

use super::{
    ConvertError, Decoder, Sections, THREADS, THREADS_MAX, UnitError,
    config::{self, Config},
    tensors::{Directory, WEIGHTS_END, WeightsFile, header},
    unit::BlockLayout,
};

/// Elements that are decoded at a time, unless a block holds more.
const STEP_ELEMENTS: u64 = 8 << 20;
/// The section that identifies a unit.
const ENCODED: &str = "encoded_exponent";
/// The U8 sections, which every unit has.
const BYTE_SECTIONS: [&str; 5] = ["luts", ENCODED, "sign_mantissa", "output_positions", "gaps"];
/// The I64 section, which a unit of one weight may lack.
const SPLITS: &str = "split_positions";
/// The maximum bytes of a section that is held in memory while a unit is decoded.
const SECTION_BYTES_MAX: u64 = 1 << 30;

/// All sections that a unit may have.
fn sections() -> impl Iterator<Item = &'static str> {
    BYTE_SECTIONS.into_iter().chain([SPLITS])
}

/// The result of [`restore`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct RestoreReport {
    /// The number of units decoded.
    pub units: u64,
    /// The number of weights in units.
    pub weights: u64,
    /// The number of tensors copied unchanged.
    pub kept_tensors: u64,
    /// Bytes of all weight files of the source.
    pub source_bytes: u64,
    /// Bytes of all weight files written.
    pub bytes: u64,
}

/// Returns whether a directory holds a DFloat11 model, according to its `config.json`.
///
/// # Errors
/// `config.json` does not name DFloat11 or cannot be read, but weights in the directory are units.
pub fn is_model(directory: &Path) -> Result<bool, ConvertError> {
    let path = directory.join(config::FILE_NAME);
    let config_error = match read_config(&path) {
        Ok(text) => match config::has_key(&text) {
            Ok(true) => return Ok(true),
            Ok(false) => ConvertError::Config { path, reason: "has no dfloat11_config".into() },
            Err(at) => ConvertError::Config { path, reason: config::object_error(&text, at) },
        },
        Err(_) if !path.exists() => ConvertError::Config { path, reason: "missing".into() },
        Err(error) => error,
    };
    match (find_unit(directory), config_error) {
        (None, _) => Ok(false),
        (Some((file, unit)), ConvertError::Config { path, reason }) => Err(ConvertError::Config {
            path,
            reason: format!("{reason}, but {file} has the DFloat11 unit '{unit}'; fetch config.json again"),
        }),
        (Some(_), error) => Err(error),
    }
}

/// The text of `config.json`.
fn read_config(path: &Path) -> Result<Vec<u8>, ConvertError> {
    let input = Input::open(path)?;
    if input.bytes() > config::BYTES_MAX {
        let reason = "has more than 16 MiB, so it is not a configuration".into();
        return Err(ConvertError::Config { path: path.into(), reason });
    }
    Ok(input.read(0, input.bytes())?)
}

/// Returns a weights file of the directory (without subdirectories) that holds a unit, and the unit. Ignores invalid
/// files; other code reports them.
fn find_unit(directory: &Path) -> Option<(String, String)> {
    let names = fs::read_dir(directory).ok()?.flatten().filter_map(|entry| entry.file_name().into_string().ok());
    let mut names: Vec<String> = names.filter(|name| name.ends_with(WEIGHTS_END)).collect();
    names.sort();
    names.into_iter().find_map(|name| {
        let file = WeightsFile::open(&directory.join(&name)).ok()?;
        let bytes: HashSet<&str> =
            file.header.tensors.iter().filter(|t| t.dtype == Dtype::U8).map(|t| t.name.as_str()).collect();
        let unit = file.header.tensors.iter().find_map(|tensor| {
            let unit = tensor.name.strip_suffix(ENCODED)?.strip_suffix('.')?;
            let has_all = BYTE_SECTIONS.iter().all(|section| bytes.contains(format!("{unit}.{section}").as_str()));
            has_all.then(|| unit.to_owned())
        })?;
        Some((name, unit))
    })
}

/// A unit of a directory.
struct Unit<'a> {
    name: String,
    parts: HashMap<&'static str, (&'a WeightsFile, &'a TensorInfo)>,
    weights: Vec<Weight>,
}

/// A weight of a unit.
struct Weight {
    name: String,
    shape: Vec<usize>,
    elements: u64,
}

/// The contents of a file of the output.
struct Shard<'a> {
    name: String,
    units: Vec<Unit<'a>>,
    kept: Vec<(&'a WeightsFile, &'a TensorInfo)>,
}

impl Shard<'_> {
    /// Returns name, dtype, shape and bytes of each tensor, in stored order.
    fn tensors(&self) -> impl Iterator<Item = (&str, Dtype, &[usize], u64)> {
        let weights = self.units.iter().flat_map(|unit| &unit.weights);
        let weights = weights.map(|w| (w.name.as_str(), Dtype::Bf16, w.shape.as_slice(), 2 * w.elements));
        let kept = self.kept.iter().map(|(_, t)| (t.name.as_str(), t.dtype, t.shape.as_slice(), t.bytes));
        weights.chain(kept)
    }
}

/// Converts a DFloat11 directory back to the BF16 model that it was made from.
///
/// Weights are restored bit by bit. The format does not record which file a tensor came from, so the output has the
/// same files as the directory, numbered. With `resume`, files that an interrupted run finished are kept if their
/// source is unchanged.
///
/// # Errors
/// The directory is not a DFloat11 model or is damaged, the shape of a weight is unknown, the output exists or cannot
/// be written, or `progress` requested a stop.
pub fn restore(
    source: &Path,
    output: &Path,
    resume: bool,
    progress: &dyn Progress,
) -> Result<RestoreReport, ConvertError> {
    let path = source.join(config::FILE_NAME);
    let text = read_config(&path)?;
    let config = Config::parse(&path, &text)?.ok_or_else(|| ConvertError::Config {
        path: path.clone(),
        reason: "has no dfloat11_config, so this is not a DFloat11 model".into(),
    })?;
    let plain = config::without_key(&text);
    let directory = Directory::open(source)?;
    let shards = shards(&directory, &config, &path, &text)?;
    check_threads_per_block(&shards, &config, &path)?;
    check_layers(&shards, &path, &text)?;

    let output = OutputDir::open(&[source.into()], output, resume)?;
    let headers: Vec<Vec<u8>> = shards.iter().map(|shard| header(&[("format", "pt")], shard.tensors())).collect();
    let size =
        |(shard, header): (&Shard<'_>, &Vec<u8>)| header.len() as u64 + shard.tensors().map(|t| t.3).sum::<u64>();
    let bytes: u64 = shards.iter().zip(&headers).map(size).sum();
    output.reserve(bytes)?;
    progress.start(bytes);
    let mut report = RestoreReport {
        bytes,
        source_bytes: directory.weights.iter().map(|file| file.input.bytes()).sum(),
        ..RestoreReport::default()
    };
    for (shard, header) in shards.iter().zip(&headers) {
        progress.file(&shard.name);
        report.units += shard.units.len() as u64;
        report.weights += shard.units.iter().map(|unit| unit.weights.len() as u64).sum::<u64>();
        report.kept_tensors += shard.kept.len() as u64;
        write(&output, shard, header, config.threads, resume, progress)?;
    }
    if shards.len() > 1 {
        output.put("model.safetensors.index.json", &index(&shards))?;
    }
    output.put(config::FILE_NAME, &plain)?;
    for (name, path) in directory.others.iter().filter(|(name, _)| name != config::FILE_NAME) {
        output.copy(path, name, progress)?;
    }
    output.finish()?;
    Ok(report)
}

/// Finds the units, and the tensors next to them.
fn shards<'a>(
    directory: &'a Directory,
    config: &Config,
    path: &Path,
    text: &[u8],
) -> Result<Vec<Shard<'a>>, ConvertError> {
    let by_name = directory.by_name();
    let unit_of = |tensor: &str| {
        let (unit, section) = tensor.rsplit_once('.')?;
        let is_section =
            sections().any(|name| name == section) && by_name.contains_key(format!("{unit}.{ENCODED}").as_str());
        is_section.then(|| unit.to_owned())
    };
    let mut shards = Vec::new();
    for file in &directory.weights {
        let mut shard = Shard { name: String::new(), units: Vec::new(), kept: Vec::new() };
        for tensor in &file.header.tensors {
            match unit_of(&tensor.name) {
                None => shard.kept.push((file, tensor)),
                Some(name) if tensor.name.ends_with(ENCODED) => {
                    shard.units.push(unit(&by_name, name, config, path, text)?);
                }
                Some(_) => {}
            }
        }
        if !shard.units.is_empty() || !shard.kept.is_empty() {
            shards.push(shard);
        }
    }
    let count = shards.len();
    let units: usize = shards.iter().map(|shard| shard.units.len()).sum();
    if units == 0 {
        let folder = path.parent().unwrap_or(path).into();
        return Err(ConvertError::Nothing {
            path: folder,
            reason: "has no DFloat11 units; fetch its *.safetensors files, too",
        });
    }
    let mut names = HashMap::new();
    for (index, shard) in shards.iter_mut().enumerate() {
        shard.name = match count {
            1 => "model.safetensors".into(),
            _ => format!("model-{:05}-of-{count:05}{WEIGHTS_END}", index + 1),
        };
        let duplicate = shard.tensors().find(|tensor| names.insert(tensor.0.to_owned(), index).is_some());
        if let Some((tensor, ..)) = duplicate {
            return Err(ConvertError::Twice { path: path.with_file_name(&shard.name), tensor: tensor.into() });
        }
    }
    Ok(shards)
}

/// Checks the number of threads per block, which is stored in `config.json` only. If it is wrong, the units are not
/// damaged.
fn check_threads_per_block(shards: &[Shard<'_>], config: &Config, path: &Path) -> Result<(), ConvertError> {
    let match_threads = |threads: usize| {
        shards.iter().flat_map(|shard| &shard.units).all(|unit| {
            let bytes = |section| unit.parts[section].1.bytes;
            BlockLayout::of(bytes(ENCODED), threads).matches_sizes(bytes("gaps"), bytes("output_positions"))
        })
    };
    if match_threads(config.threads) {
        return Ok(());
    }
    // Kernels have whole warps. Units that agree on no number are checked one by one later.
    let matching = [THREADS].into_iter().chain((32..=THREADS_MAX).step_by(32)).find(|&threads| match_threads(threads));
    let Some(matching) = matching else { return Ok(()) };
    let reason = format!(
        "dfloat11_config: threads_per_block is {}, but the sections of all units match {matching}; fetch config.json \
         again",
        config.threads
    );
    Err(ConvertError::Config { path: path.into(), reason })
}

/// Checks that each layer that `config.json` counts has tensors: no file lists the others.
fn check_layers(shards: &[Shard<'_>], path: &Path, text: &[u8]) -> Result<(), ConvertError> {
    let Some(layers) = config::number(text, &["num_hidden_layers"]) else { return Ok(()) };
    let layer_of = |name: &str| {
        let mut parts = name.split('.').skip_while(|part| *part != "layers");
        parts.nth(1)?.parse::<u64>().ok()
    };
    let present: HashSet<u64> =
        shards.iter().flat_map(Shard::tensors).filter_map(|tensor| layer_of(tensor.0)).collect();
    let missing = (0..layers).find(|layer| !present.contains(layer));
    // Without any, their names are others.
    let Some(layer) = missing.filter(|_| !present.is_empty()) else { return Ok(()) };
    let reason = format!("has {layers} layers, but no file has a tensor of layer {layer}; fetch all *.safetensors");
    Err(ConvertError::Config { path: path.into(), reason })
}

fn unit<'a>(
    by_name: &HashMap<&str, (&'a WeightsFile, &'a TensorInfo)>,
    name: String,
    config: &Config,
    path: &Path,
    text: &[u8],
) -> Result<Unit<'a>, ConvertError> {
    let mut parts = HashMap::new();
    let (first, _) = by_name[format!("{name}.{ENCODED}").as_str()];
    for section in sections() {
        let tensor = format!("{name}.{section}");
        let fail = |file: &WeightsFile, reason: String| ConvertError::Section {
            path: file.path.clone(),
            tensor: tensor.clone(),
            reason,
        };
        let dtype = if section == SPLITS { Dtype::I64 } else { Dtype::U8 };
        match by_name.get(tensor.as_str()) {
            Some((file, found)) if found.dtype != dtype => {
                return Err(fail(file, format!("its dtype is {}, expected {dtype}", found.dtype)));
            }
            Some(&place) => _ = parts.insert(section, place),
            None if dtype == Dtype::I64 => {}
            None => return Err(fail(first, "the section is missing".into())),
        }
    }
    let elements = parts["sign_mantissa"].1.bytes;
    let names = config.weights(&name).ok_or_else(|| ConvertError::Config {
        path: path.into(),
        reason: format!("dfloat11_config has no pattern for the unit '{name}'; fetch the model again"),
    })?;
    let splits = match parts.get(SPLITS) {
        Some((file, tensor)) => {
            let bytes = file.input.read(tensor.offset, check_section_size(file, tensor)?)?;
            bytes.chunks_exact(8).map(|split| u64::from_le_bytes(split.try_into().unwrap_or_default())).collect()
        }
        None => Vec::new(),
    };
    let bounds: Vec<u64> = [0].into_iter().chain(splits).chain([elements]).collect();
    if bounds.len() != names.len() + 1 || bounds.windows(2).any(|pair| pair[0] > pair[1]) {
        let (file, tensor) = parts.get(SPLITS).unwrap_or(&parts[ENCODED]);
        return Err(ConvertError::Section {
            path: file.path.clone(),
            tensor: tensor.name.clone(),
            reason: format!(
                "{:?} do not split {elements} elements into {} weights",
                &bounds[1..bounds.len() - 1],
                names.len()
            ),
        });
    }
    let mut weights = Vec::with_capacity(names.len());
    for (name, pair) in names.into_iter().zip(bounds.windows(2)) {
        let elements = pair[1] - pair[0];
        let shape = shape(&name, elements, text).map_err(|reason| ConvertError::Shape {
            path: path.into(),
            tensor: name.clone(),
            elements,
            reason,
        })?;
        weights.push(Weight { name, shape, elements });
    }
    Ok(Unit { name, parts, weights })
}

/// Returns the shape of a weight, `[outputs, inputs]`, according to its role.
fn shape(name: &str, elements: u64, text: &[u8]) -> Result<Vec<usize>, String> {
    let help = "add the config.json of the model, with hidden_size";
    let hidden = config::number(text, &["hidden_size", "d_model", "n_embd"]);
    let hidden = hidden.ok_or_else(|| format!("config.json has no hidden_size; {help}"))?;
    let (role, _) = roles::of(name);
    let is_input_hidden = match role {
        Role::Q | Role::K | Role::V | Role::Qkv | Role::Gate | Role::Up | Role::GateUp => true,
        Role::Embedding | Role::LmHead => true,
        Role::O | Role::Down => false,
        _ => {
            return Err("its name is neither that of a projection nor of an embedding".into());
        }
    };
    let quotient = elements / hidden;
    if quotient * hidden != elements || elements == 0 {
        return Err(format!("the size is not a multiple of hidden_size {hidden}; {help}"));
    }
    if matches!(role, Role::Embedding | Role::LmHead)
        && let Some(vocab) = config::number(text, &["vocab_size"])
        && vocab != quotient
    {
        return Err(format!("it has {quotient} rows of hidden_size {hidden}, but vocab_size is {vocab}; {help}"));
    }
    let (rows, cols) = if is_input_hidden { (quotient, hidden) } else { (hidden, quotient) };
    // Fits `usize`, because every element has a byte in a file.
    Ok(vec![rows as usize, cols as usize])
}

fn check_section_size(file: &WeightsFile, tensor: &TensorInfo) -> Result<u64, ConvertError> {
    if tensor.bytes <= SECTION_BYTES_MAX {
        return Ok(tensor.bytes);
    }
    Err(ConvertError::Section {
        path: file.path.clone(),
        tensor: tensor.name.clone(),
        reason: format!("{} bytes, above the limit of {SECTION_BYTES_MAX}", tensor.bytes),
    })
}

/// Writes a file of the output.
fn write(
    output: &OutputDir,
    shard: &Shard<'_>,
    header: &[u8],
    threads: usize,
    resume: bool,
    progress: &dyn Progress,
) -> Result<(), ConvertError> {
    // Everything that determines the bytes of the file.
    let mut key = Digester::default();
    key.update(header);
    key.update(&(threads as u64).to_le_bytes());
    let sources = shard.units.iter().flat_map(|unit| sections().filter_map(|section| unit.parts.get(section)));
    let total: u64 = header.len() as u64 + shard.tensors().map(|tensor| tensor.3).sum::<u64>();
    for (file, tensor) in sources.chain(&shard.kept) {
        let digest = file.input.stream(tensor.offset, tensor.bytes, |_| output.check(progress))?;
        key.update(digest.to_string().as_bytes());
    }
    let key = key.finish();
    if resume && output.take_over(&shard.name, key) {
        progress.advance(total);
        return Ok(());
    }
    let out = output.create(&shard.name)?;
    out.write_at(header, 0)?;
    let mut at = header.len() as u64;
    for unit in &shard.units {
        progress.tensor(&unit.name);
        let read = |section| -> Result<Vec<u8>, ConvertError> {
            let (file, tensor) = unit.parts[section];
            Ok(file.input.read(tensor.offset, check_section_size(file, tensor)?)?)
        };
        let (encoded, sign_mantissa) = (unit.parts[ENCODED], unit.parts["sign_mantissa"]);
        let unit_error = |source: UnitError| {
            // A section may be in another file.
            let (file, tensor) = unit.parts.get(source.section()).unwrap_or(&encoded);
            ConvertError::Unit { path: file.path.clone(), unit: unit.name.clone(), offset: tensor.offset, source }
        };
        let decoder = Decoder::new(&Sections {
            luts: &read("luts")?,
            output_positions: &read("output_positions")?,
            gaps: &read("gaps")?,
            encoded_bytes: encoded.1.bytes,
            elements: sign_mantissa.1.bytes,
            threads: threads as u64,
        });
        let decoder = decoder.map_err(unit_error)?;
        let mut block = 0;
        while block < decoder.blocks() {
            output.check(progress)?;
            let blocks = decoder.blocks_from(block, STEP_ELEMENTS);
            let (codes, elements) = (decoder.encoded(blocks.clone()), decoder.elements(blocks.clone()));
            let codes = encoded.0.input.read(encoded.1.offset + codes.start, codes.end - codes.start)?;
            let count = elements.end - elements.start;
            let sign_mantissa_bytes = sign_mantissa.0.input.read(sign_mantissa.1.offset + elements.start, count)?;
            let mut weights = vec![0; 2 * sign_mantissa_bytes.len()];
            decoder.decode(blocks.clone(), &codes, &sign_mantissa_bytes, &mut weights).map_err(unit_error)?;
            out.write_at(&weights, at)?;
            at += 2 * count;
            progress.advance(2 * count);
            block = blocks.end;
        }
    }
    for (file, tensor) in &shard.kept {
        progress.tensor(&tensor.name);
        file.input.stream(tensor.offset, tensor.bytes, |piece| {
            output.check(progress)?;
            out.write_at(piece, at)?;
            at += piece.len() as u64;
            progress.advance(piece.len() as u64);
            Ok(())
        })?;
    }
    let sources = shard.units.iter().flat_map(|unit| unit.parts.values()).chain(&shard.kept);
    sources.map(|(file, _)| file).try_for_each(|file| file.input.check_unchanged())?;
    progress.advance(header.len() as u64);
    Ok(out.finish(Some(key))?)
}

/// Returns the index of the output files.
fn index(shards: &[Shard<'_>]) -> Vec<u8> {
    let total: u64 = shards.iter().flat_map(Shard::tensors).map(|tensor| tensor.3).sum();
    let map: serde_json::Map<String, serde_json::Value> =
        shards.iter().flat_map(|shard| shard.tensors().map(|t| (t.0.to_owned(), shard.name.clone().into()))).collect();
    let value = serde_json::json!({ "metadata": { "total_size": total }, "weight_map": map });
    format!("{value:#}\n").into_bytes()
}
