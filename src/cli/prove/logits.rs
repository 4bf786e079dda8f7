//! Logits for a certificate: of the CPU reference, from source and bundle, or of an engine on a GPU.

use std::path::Path;

use sha2::{Digest as _, Sha256};
use unweight::{
    format::{
        Placement,
        bundle::{
            Bundle, BundleError, Progress,
            manifest::{FileEntry, WeightsFile},
        },
        raw::Input,
    },
    model::{
        ModelConfig, ModelWeights,
        reference::{Reference, bundle_values, widen_bf16},
    },
};

use super::{
    super::failure::{Failure, Result},
    certificate::{Logits, PROMPT_TOKENS, PromptLogits, hex},
};

/// The largest model that the CPU reference runs, parameters.
const PARAMETERS_MAX: u64 = 64 << 20;
/// The device of the CPU reference.
pub const CPU: &str = "cpu-reference";

/// Why a tensor could not be read.
type Cause = Box<dyn std::error::Error + Send + Sync>;

/// Returns `count` prompts of arbitrary tokens, always the same.
pub fn prompts(config: &ModelConfig, count: usize) -> Vec<Vec<u32>> {
    // Numerical Recipes' generator.
    let mut state = 1u32;
    let mut token = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        ((u64::from(state) * u64::from(config.vocab)) >> 32) as u32
    };
    let length = PROMPT_TOKENS.min(config.max_positions as usize);
    (0..count).map(|_| (0..length).map(|_| token()).collect()).collect()
}

/// Whether the CPU reference runs this model.
pub fn runs_on_cpu(bundle: &Bundle) -> bool {
    let config = ModelConfig::of_bundle(bundle);
    let is_bf16 = bundle.tensors().all(|tensor| tensor.entry().dtype.to_string() == "BF16");
    is_bf16 && config.is_ok_and(|config| config.weight_bytes(Placement::Bf16) / 2 <= PARAMETERS_MAX)
}

/// Computes logits from the bundle, and from the source if there is one, which must give the same bits. `progress` can
/// end it.
pub fn on_cpu(bundle: &Bundle, source: Option<&Path>, prompts: &[Vec<u32>], progress: &dyn Progress) -> Result<Logits> {
    let config = ModelConfig::of_bundle(bundle).map_err(Failure::other)?;
    let weights = ModelWeights::of_bundle(&config, bundle).map_err(Failure::other)?;
    let mut all = Vec::new();
    let of_bundle = bundle_values(bundle);
    for tokens in prompts {
        // The reference asks for each tensor when it needs it.
        let values = |name: &str| -> std::result::Result<Vec<f32>, Cause> {
            if progress.cancelled() { Err(BundleError::Cancelled.into()) } else { Ok(of_bundle(name)?) }
        };
        let logits = Reference::new(&config, &weights, values).logits(tokens);
        let failure = |error| if progress.cancelled() { BundleError::Cancelled.into() } else { Failure::other(error) };
        let logits = logits.map_err(failure)?;
        if let Some(source) = source {
            let values = |name: &str| -> std::result::Result<Vec<f32>, Cause> {
                if progress.cancelled() {
                    return Err(BundleError::Cancelled.into());
                }
                source_values(bundle, source, name).map_err(|failure| failure.to_string().into())
            };
            let expected = Reference::new(&config, &weights, values).logits(tokens).map_err(failure)?;
            let bits = |logits: &[f32]| logits.iter().map(|logit| logit.to_bits()).collect::<Vec<_>>();
            if bits(&logits) != bits(&expected) {
                let message = format!("the logits of prompt {} differ between source and bundle", all.len());
                return Err(Failure::mismatch("logits-differ", message, "`unweight verify BUNDLE --against MODEL`"));
            }
        }
        let sha = logits.iter().fold(Sha256::new(), |sha, logit| sha.chain_update(logit.to_le_bytes()));
        all.push(PromptLogits { tokens: tokens.clone(), sha256: hex(sha) });
    }
    Ok(Logits { device: CPU.into(), placement: None, dtype: "f32".into(), prompts: all })
}

/// Reads a BF16 tensor of the source, whose files have the layout that the manifest lists.
fn source_values(bundle: &Bundle, source: &Path, name: &str) -> Result<Vec<f32>> {
    let files = bundle.manifest().files.iter().filter_map(FileEntry::weights);
    for file in files.filter(|file| bundle.is_of_model(&file.name)) {
        if let Some((offset, bytes)) = place(file, name) {
            let input = Input::open(&source.join(&file.name))?;
            return Ok(widen_bf16(&input.read(offset, bytes)?));
        }
    }
    Err(Failure::new("tensor-not-found", format!("no tensor {name}"), "`unweight inspect BUNDLE` lists the tensors"))
}

/// Returns offset and size of a tensor in its source file.
fn place(file: &WeightsFile, name: &str) -> Option<(u64, u64)> {
    let mut offset = file.header_bytes;
    for tensor in &file.tensors {
        let bytes = tensor.original_bytes()?;
        if tensor.name == name {
            return Some((offset, bytes));
        }
        offset += bytes;
    }
    None
}

/// Computes logits with the engine on the first GPU, in the default placement.
pub fn on_gpu(bundle: &Bundle, prompts: &[Vec<u32>], progress: &dyn Progress) -> Result<Logits> {
    use unweight::{
        engine::{Engine, EngineOptions},
        rt::{KernelSet, env::Env, raw::device::Device},
    };

    let env = Env::process().map_err(|error| Failure::other(error.clone()))?;
    let device = Device::open(0)?;
    let kernels = KernelSet::open(&device, env);
    let mut engine = Engine::load(&kernels, bundle, EngineOptions::default(), &|_| ())?;
    let mut all = Vec::new();
    for tokens in prompts {
        if progress.cancelled() {
            return Err(BundleError::Cancelled.into());
        }
        let logits = engine.logits(tokens)?;
        let sha = logits.iter().fold(Sha256::new(), |sha, logit| sha.chain_update(logit.to_bits().to_le_bytes()));
        all.push(PromptLogits { tokens: tokens.clone(), sha256: hex(sha) });
    }
    let placement = Some(engine.options().placement.unwrap_or_default().to_string());
    Ok(Logits { device: kernels.device().info().name.clone(), placement, dtype: "bf16".into(), prompts: all })
}
