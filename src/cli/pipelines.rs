//! Options of the engine, and the plan that `tune` saved for MLPs.

use clap::ValueEnum;
use unweight::{
    engine::{Linears, LoadProgress, MlpWeights, Plan, Resident, raw::pipelines::tuned},
    format::bundle::{ATTACHED_NAME, Bundle},
    rt::DeviceInfo,
};

use super::output::Output;

/// What linears run from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Form {
    /// Packed weights, by the kernels of this project
    Packed,
    /// The same weights as BF16, by cuBLAS
    Cublas,
}

impl From<Form> for Linears {
    fn from(encoding: Form) -> Self {
        match encoding {
            Form::Packed => Self::Packed,
            Form::Cublas => Self::Bf16,
        }
    }
}

/// What compact tensors lie as.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ResidentArg {
    /// Fast where a sequence of 8192 tokens, or of --context, fits beside it; else small
    Auto,
    /// Expanded to 12 bits a weight when loaded
    Fast,
    /// As they are stored, a tenth smaller
    Small,
}

impl From<ResidentArg> for Option<Resident> {
    fn from(resident: ResidentArg) -> Self {
        match resident {
            ResidentArg::Auto => None,
            ResidentArg::Fast => Some(Resident::Fast),
            ResidentArg::Small => Some(Resident::Small),
        }
    }
}

/// What the weights of MLPs lie as.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Lie {
    /// As all linears
    Linears,
    /// As they are stored, by the plan that `tune --save` made, if there is one
    Stored,
    /// The same, every other Huffman-coded layer as a palette
    Alternate,
}

impl From<Lie> for MlpWeights {
    fn from(lie: Lie) -> Self {
        match lie {
            Lie::Linears => Self::Linears,
            Lie::Stored => Self::Stored,
            Lie::Alternate => Self::Alternate,
        }
    }
}

impl Lie {
    /// As options and reports name it.
    pub fn name(self) -> &'static str {
        MlpWeights::from(self).name()
    }
}

/// The plan beside a bundle: names of pipelines, no code. One that is damaged is as if it were not there.
pub fn saved_plan(bundle: &Bundle, output: Output) -> Plan {
    let attached = match bundle.attached() {
        Ok(attached) => attached,
        Err(error) => {
            output.note(format_args!("not used: {error}"));
            return Plan::default();
        }
    };
    let Some(text) = attached.as_ref().and_then(|attached| attached.plan()) else { return Plan::default() };
    match Plan::parse(text.as_bytes()) {
        Ok(plan) => plan,
        Err(error) => {
            output.note(format_args!("{ATTACHED_NAME}: not used: {error}"));
            Plan::default()
        }
    }
}

/// Says so where a plan is of no use on this device.
pub fn note_unused(plan: &Plan, lie: Lie, bundle: &Bundle, device: &DeviceInfo, output: Output) {
    let model = bundle.manifest().manifest_digest.to_string();
    let fits = |batch| plan.setting(batch, &tuned::key(&model, lie.into(), batch, device)).is_some();
    if !plan.settings().is_empty() && !plan.settings().iter().any(|measured| fits(measured.batch)) {
        output.note(
            "the saved plan was measured on another device, driver or program, or for another --mlp: best guesses are \
             taken; `unweight tune --save` measures here",
        );
    }
}

/// Says what loading does, where that takes long or was asked for.
pub fn note_load(output: Output, loaded: &LoadProgress<'_>) {
    match loaded {
        LoadProgress::Kernel(kernel) if !kernel.artifact.state.is_hit() => {
            output.note(format_args!("[{}/{}] {} compiled", kernel.done, kernel.total, kernel.artifact.name));
        }
        LoadProgress::Layers { done, total } if output.verbose > 1 => {
            output.note(format_args!("{done} of {total} layers"));
        }
        _ => {}
    }
}
