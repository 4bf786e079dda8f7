//! Converts a model to a DFloat11 directory, which the `from_pretrained` of the original package reads.
//!
//! ```text
//! model.layers.0.self_attn.q_proj.weight, ...  --one unit-->  model_layers_0.safetensors: the unit's sections, and the
//!                                                             other tensors of the module
//! model.norm.weight, ...                       ------------>  model.safetensors
//! config.json                                  --add key--->  config.json
//! ```

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    path::Path,
};

use serde::Serialize;
use unweight_format::{
    Digest, Histogram, Role,
    bundle::Progress,
    raw::{Digester, OutputDir, roles},
    safetensors::Dtype,
};

use super::{
    Code, ConvertError, Encoder, NotEncodable, Sizes, THREADS, config, is_model,
    tensors::{Model, Tensor, WEIGHTS_END, header},
};

/// The file for tensors of no unit.
const REST: &str = "model.safetensors";

/// How a model is converted.
#[derive(Debug, Clone, Copy, Default)]
#[non_exhaustive]
pub struct ConvertOptions {
    /// Keep files that an interrupted run finished.
    pub resume: bool,
}

impl ConvertOptions {
    /// Sets whether to keep files that an interrupted run finished.
    pub fn resume(self, resume: bool) -> Self {
        Self { resume }
    }
}

/// A module whose weights stay BF16.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Kept {
    /// Name of the module.
    pub unit: String,
    /// The reason why it is not coded.
    pub reason: String,
}

/// The result of [`convert`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct ConvertReport {
    /// The number of units.
    pub units: u64,
    /// The number of weights in units.
    pub weights: u64,
    /// Modules that the format cannot hold.
    pub kept: Vec<Kept>,
    /// Bytes of all tensors of the source.
    pub source_bytes: u64,
    /// Bytes of all weight files written.
    pub bytes: u64,
    /// Bytes of the weights of all units in the source.
    pub unit_source_bytes: u64,
    /// Bytes of the sections of all units.
    pub unit_bytes: u64,
}

/// The weights of a module, candidates for one unit.
struct Group<'a> {
    name: String,
    weights: Vec<&'a Tensor>,
}

/// A group that the format can hold.
struct Planned<'a> {
    group: Group<'a>,
    code: Code,
    luts: Vec<u8>,
    sizes: Sizes,
    /// Digest of each weight.
    digests: Vec<Digest>,
}

/// Converts a model directory or a bundle to a DFloat11 directory.
///
/// The units are the linears of each decoder layer, the head and the embedding, as in the package's own examples.
/// Weights that the format cannot hold stay BF16; the package loads these, too.
///
/// # Errors
/// The source is damaged or is already DFloat11, none of its tensors can be coded, the output exists or cannot be
/// written, or `progress` requested a stop.
pub fn convert(
    source: &Path,
    output: &Path,
    options: ConvertOptions,
    progress: &dyn Progress,
) -> Result<ConvertReport, ConvertError> {
    let nothing_to_convert = |reason| ConvertError::Nothing { path: source.into(), reason };
    let model = Model::open(source)?;
    // Also rejects units without a valid configuration: no program could read the converted output.
    if is_model(source)? {
        return Err(nothing_to_convert("is already a DFloat11 model"));
    }
    let text = model.read(config::FILE_NAME, config::BYTES_MAX)?;
    let text = text.as_deref().unwrap_or(b"{}");
    let object_error = |at| ConvertError::Config {
        path: source.join(config::FILE_NAME),
        reason: format!("{}; correct the file, or remove it", config::object_error(text, at)),
    };
    config::has_key(text).map_err(object_error)?;
    let (groups, mut kept) = groups(&model.tensors);
    let output = OutputDir::open(&[source.into()], output, options.resume)?;
    let source_bytes: u64 = model.tensors.iter().map(|tensor| tensor.bytes).sum();
    let group_bytes: u64 = groups.iter().flat_map(|group| &group.weights).map(|tensor| tensor.bytes).sum();
    // Coded weights are read twice: the frequencies of the exponents determine the code.
    progress.start(source_bytes + group_bytes);
    let mut planned = Vec::new();
    for group in groups {
        match plan(&model, &group, &output, progress)? {
            Ok((code, luts, sizes, digests)) => planned.push(Planned { group, code, luts, sizes, digests }),
            Err(reason) => kept.push(Kept { unit: group.name, reason: reason.to_string() }),
        }
    }
    if planned.is_empty() {
        return Err(nothing_to_convert("has no BF16 linear of a layer, head or embedding that DFloat11 can store"));
    }
    let mut report = ConvertReport { kept, source_bytes, ..ConvertReport::default() };
    let mut rest = model.tensors.iter().collect::<Vec<_>>();
    let mut names = BTreeSet::from([REST.to_owned()]);
    for unit in &planned {
        let prefix = format!("{}.", unit.group.name);
        let (in_unit, others): (Vec<_>, Vec<_>) = rest.into_iter().partition(|tensor| tensor.name.starts_with(&prefix));
        rest = others;
        let copied = in_unit.into_iter().filter(|tensor| !unit.group.weights.contains(tensor)).collect();
        let mut name = format!("{}{WEIGHTS_END}", unit.group.name.replace('.', "_"));
        // `a.b` and `a_b` map to the same file name.
        while !names.insert(name.clone()) {
            name.insert(0, '_');
        }
        report.bytes += File { name, unit: Some(unit), copied }.write(&model, &output, options.resume, progress)?;
        report.units += 1;
        report.weights += unit.group.weights.len() as u64;
        report.unit_source_bytes += 2 * unit.sizes.elements;
        report.unit_bytes += unit.sections().iter().map(|(_, _, bytes)| bytes).sum::<u64>();
    }
    if !rest.is_empty() {
        let file = File { name: REST.into(), unit: None, copied: rest };
        report.bytes += file.write(&model, &output, options.resume, progress)?;
    }
    let patterns = patterns(&planned);
    output.put(config::FILE_NAME, &config::with_key(text, &patterns).map_err(object_error)?)?;
    for name in model.others().iter().filter(|name| *name != config::FILE_NAME) {
        model.copy(name, &output, progress)?;
    }
    output.finish()?;
    Ok(report)
}

/// Returns the groups, which are the linears of each layer, the head and the embedding, and the modules that stay BF16.
fn groups(tensors: &[Tensor]) -> (Vec<Group<'_>>, Vec<Kept>) {
    let has_head = tensors.iter().any(|tensor| roles::of(&tensor.name).0 == Role::LmHead);
    let (mut units, mut kept) = (Vec::<Group<'_>>::new(), Vec::new());
    let mut by_name = HashMap::new();
    for tensor in tensors {
        let Some(module) = tensor.name.strip_suffix(".weight") else { continue };
        if tensor.dtype != Dtype::Bf16 || tensor.shape.len() != 2 {
            continue;
        }
        let unit = match roles::of(&tensor.name) {
            (Role::LmHead, None) => module,
            (Role::Embedding, None) if has_head => module,
            (Role::Embedding, None) => {
                let reason = "the head shares its weights, and the package would load the head without weights".into();
                kept.push(Kept { unit: module.into(), reason });
                continue;
            }
            (role, Some(layer)) if is_linear(role, module) => match layer_of(module, layer) {
                Some(unit) => unit,
                None => continue,
            },
            _ => continue,
        };
        let index = *by_name.entry(unit).or_insert_with(|| {
            units.push(Group { name: unit.into(), weights: Vec::new() });
            units.len() - 1
        });
        units[index].weights.push(tensor);
    }
    for unit in &mut units {
        unit.weights.sort_by_key(|tensor| (rank(roles::of(&tensor.name).0), tensor.name.clone()));
    }
    // Layers in numerical order, as the package visits modules.
    units.sort_by_key(|unit| (roles::of(&unit.weights[0].name).1.is_some(), roles::of(&unit.weights[0].name).1));
    (units, kept)
}

/// Returns whether PyTorch represents the module as `Linear`. The transposed modules of GPT-2 are not, and neither are
/// experts, which newer models stack.
fn is_linear(role: Role, module: &str) -> bool {
    let is_known = role.is_attention() || role.is_mlp();
    is_known && !module.contains("experts") && !module.rsplit('.').next().is_some_and(|last| last.starts_with("c_"))
}

/// Returns the name of the layer that contains a module.
fn layer_of(module: &str, layer: u32) -> Option<&str> {
    let infix = format!(".{layer}.");
    let start = module.find(&infix)?;
    Some(&module[..start + infix.len() - 1])
}

/// Returns the order of weights in a unit.
fn rank(role: Role) -> usize {
    const ORDER: [Role; 9] =
        [Role::Qkv, Role::Q, Role::K, Role::V, Role::O, Role::GateUp, Role::Gate, Role::Up, Role::Down];
    ORDER.iter().position(|&other| other == role).unwrap_or(ORDER.len())
}

/// Returns one pattern for all layers whose units have the same modules, and one for each other unit.
fn patterns(planned: &[Planned<'_>]) -> Vec<(String, Vec<String>)> {
    let escaped = |name: &str| name.replace('.', r"\.");
    let mut layers: BTreeMap<(&str, Vec<String>), Vec<&str>> = BTreeMap::new();
    let mut found = Vec::new();
    for unit in planned {
        let name = unit.group.name.as_str();
        let submodule = |tensor: &&Tensor| {
            let module = tensor.name.strip_prefix(name)?.strip_prefix('.')?.strip_suffix(".weight")?;
            Some(module.to_owned())
        };
        let modules: Vec<String> = unit.group.weights.iter().filter_map(submodule).collect();
        match name.rsplit_once('.') {
            Some((prefix, number)) if !modules.is_empty() => layers.entry((prefix, modules)).or_default().push(number),
            _ => found.push((escaped(name), Vec::new())),
        }
    }
    let single_kind: BTreeSet<&str> = {
        let mut kinds: BTreeMap<&str, usize> = BTreeMap::new();
        layers.keys().for_each(|(prefix, _)| *kinds.entry(prefix).or_default() += 1);
        kinds.into_iter().filter(|(_, kinds)| *kinds == 1).map(|(prefix, _)| prefix).collect()
    };
    for ((prefix, modules), numbers) in &layers {
        let numbers_pattern =
            if single_kind.contains(prefix) { r"\d+".to_owned() } else { format!("(?:{})", numbers.join("|")) };
        found.push((format!(r"{}\.{numbers_pattern}", escaped(prefix)), modules.clone()));
    }
    found
}

type Plan = (Code, Vec<u8>, Sizes, Vec<Digest>);

/// Counts the exponents of a group, and returns the code that results.
fn plan(
    model: &Model,
    group: &Group<'_>,
    output: &OutputDir,
    progress: &dyn Progress,
) -> Result<Result<Plan, NotEncodable>, ConvertError> {
    let (mut counts, mut digests) = (Histogram::default(), Vec::new());
    for weight in &group.weights {
        progress.tensor(&weight.name);
        digests.push(model.stream(weight, |piece| {
            output.check(progress)?;
            counts.merge(&Histogram::of(piece));
            progress.advance(piece.len() as u64);
            Ok(())
        })?);
    }
    let code = || {
        let code = Code::of(&counts)?;
        let (luts, sizes) = (code.luts()?, Sizes::of(&code, &counts, THREADS)?);
        Ok((code, luts, sizes))
    };
    Ok(code().map(|(code, luts, sizes)| (code, luts, sizes, digests)))
}

impl Planned<'_> {
    /// Returns name, dtype and bytes of each section, in the order in which the reference library stores them.
    fn sections(&self) -> [(&'static str, Dtype, u64); 6] {
        [
            ("split_positions", Dtype::I64, 8 * (self.group.weights.len() as u64 - 1)),
            ("encoded_exponent", Dtype::U8, self.sizes.encoded_exponent),
            ("gaps", Dtype::U8, self.sizes.gaps),
            ("luts", Dtype::U8, self.luts.len() as u64),
            ("output_positions", Dtype::U8, self.sizes.output_positions),
            ("sign_mantissa", Dtype::U8, self.sizes.elements),
        ]
    }
}

/// A file of the output.
struct File<'a> {
    name: String,
    unit: Option<&'a Planned<'a>>,
    /// Tensors to copy unchanged.
    copied: Vec<&'a Tensor>,
}

/// The source of a tensor of the output.
enum Part<'a> {
    Section(&'static str),
    Tensor(&'a Tensor),
}

impl File<'_> {
    /// Writes the file; returns its size in bytes.
    fn write(
        &self,
        model: &Model,
        output: &OutputDir,
        resume: bool,
        progress: &dyn Progress,
    ) -> Result<u64, ConvertError> {
        progress.file(&self.name);
        // Largest dtypes first, then by name, as the reference library stores them.
        let mut parts: Vec<(String, Dtype, Vec<usize>, u64, Part<'_>)> = Vec::new();
        if let Some(unit) = self.unit {
            for (section, dtype, bytes) in unit.sections() {
                let shape = match section {
                    "luts" => vec![bytes as usize / 256, 256],
                    _ => vec![(bytes * 8 / dtype.bits()) as usize],
                };
                parts.push((format!("{}.{section}", unit.group.name), dtype, shape, bytes, Part::Section(section)));
            }
        }
        let copied = self.copied.iter().map(|&t| (t.name.clone(), t.dtype, t.shape.clone(), t.bytes, Part::Tensor(t)));
        parts.extend(copied);
        parts.sort_by(|a, b| b.1.bits().cmp(&a.1.bits()).then_with(|| a.0.cmp(&b.0)));
        let metadata: &[(&str, &str)] = if self.unit.is_some() { &[] } else { &[("format", "pt")] };
        let header = header(
            metadata,
            parts.iter().map(|(name, dtype, shape, bytes, _)| (name.as_str(), *dtype, shape.as_slice(), *bytes)),
        );
        let mut at = header.len() as u64;
        let total = at + parts.iter().map(|part| part.3).sum::<u64>();

        let mut key = Digester::default();
        key.update(&header);
        let mut copied_digests = HashMap::new();
        for tensor in &self.copied {
            let digest = model.stream(tensor, |_| output.check(progress))?;
            key.update(digest.to_string().as_bytes());
            copied_digests.insert(tensor.name.as_str(), digest);
        }
        let unit_digests = self.unit.iter().flat_map(|unit| &unit.digests);
        unit_digests.for_each(|digest| key.update(digest.to_string().as_bytes()));
        let key = key.finish();
        let tensors = self.unit.iter().flat_map(|unit| unit.group.weights.iter()).chain(&self.copied);
        if resume && output.take_over(&self.name, key) {
            progress.advance(tensors.map(|tensor| tensor.bytes).sum());
            return Ok(total);
        }

        let out = output.create(&self.name)?;
        out.write_at(&header, 0)?;
        let mut sections = HashMap::new();
        for (_, _, _, bytes, part) in &parts {
            match part {
                Part::Section(section) => _ = sections.insert(*section, at),
                Part::Tensor(tensor) => {
                    progress.tensor(&tensor.name);
                    let mut to = at;
                    let digest = model.stream(tensor, |piece| {
                        output.check(progress)?;
                        out.write_at(piece, to)?;
                        to += piece.len() as u64;
                        progress.advance(piece.len() as u64);
                        Ok(())
                    })?;
                    if Some(&digest) != copied_digests.get(tensor.name.as_str()) {
                        return Err(model.changed(tensor));
                    }
                }
            }
            at += bytes;
        }
        if let Some(unit) = self.unit {
            unit.write(model, output, &out, &sections, progress)?;
        }
        out.finish(Some(key))?;
        Ok(total)
    }
}

impl Planned<'_> {
    /// Writes the sections at their offsets.
    fn write(
        &self,
        model: &Model,
        output: &OutputDir,
        out: &unweight_format::raw::OutputFile<'_>,
        sections: &HashMap<&'static str, u64>,
        progress: &dyn Progress,
    ) -> Result<(), ConvertError> {
        let (mut codes_at, mut rest_at) = (sections["encoded_exponent"], sections["sign_mantissa"]);
        let mut encoder = Encoder::new(&self.code, THREADS);
        let (mut codes, mut rest) = (Vec::new(), Vec::new());
        let (mut splits, mut elements) = (Vec::new(), 0u64);
        for (weight, expected) in self.group.weights.iter().zip(&self.digests) {
            progress.tensor(&weight.name);
            let digest = model.stream(weight, |piece| {
                output.check(progress)?;
                codes.clear();
                rest.clear();
                encoder.push(piece, &mut codes, &mut rest);
                out.write_at(&codes, codes_at)?;
                out.write_at(&rest, rest_at)?;
                codes_at += codes.len() as u64;
                rest_at += rest.len() as u64;
                progress.advance(piece.len() as u64);
                Ok(())
            })?;
            if digest != *expected {
                return Err(model.changed(weight));
            }
            elements += weight.bytes / 2;
            splits.extend(elements.to_le_bytes());
        }
        codes.clear();
        let (positions, gaps) = encoder.finish(&mut codes);
        out.write_at(&codes, codes_at)?;
        splits.truncate(splits.len() - 8);
        for (section, bytes) in
            [("split_positions", &splits), ("gaps", &gaps), ("luts", &self.luts), ("output_positions", &positions)]
        {
            out.write_at(bytes, sections[section])?;
        }
        Ok(())
    }
}
