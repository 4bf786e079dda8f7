//! Routing of a mixture of experts: the choice of experts, the lists for grouped products, and the sum of each token's
//! rows.

use std::sync::Arc;

use unweight_codegen::{
    VariantSpec,
    abi::RouteArgs,
    family::Instruction,
    plan::GemmShape,
    spec::{Arch, Op, RouteSpec, RouteStage},
};

use crate::{
    device::{
        DeviceBuffer, DeviceError, KernelSet, LaunchError, MatrixRef, Stream, module::LoadedKernel, view::check_device,
    },
    weight::check_capacity,
};

/// How experts and weights follow from a router's logits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RouterConfig {
    /// Experts per token among which the router chooses.
    pub top_k: u32,
    /// Whether a token's weights add up to 1; otherwise they are shares of the softmax over all experts.
    pub normalized: bool,
    /// Whether weights are rounded to bf16.
    pub rounded: bool,
    /// Experts that every token has in addition: the last ones, with weight 1.
    pub shared: u32,
    /// Whether the weight of these is the sigmoid of one more logit instead of 1.
    pub gated: bool,
    /// The factor of all weights, after rounding.
    pub scale: f32,
    /// The factor of the weights of chosen experts, before rounding; 1 unless the router has a correction bias.
    pub routed_scale: f32,
    /// Makes the router a SparseMixer: experts are chosen one after the other, each with its share of the softmax over
    /// itself and those later ones that are near. An expert with logit `x` is not near one with logit `y` if `(y - x) /
    /// max(|x|, y)` is larger than this.
    pub cutoff: Option<f32>,
}

impl RouterConfig {
    /// Returns the number of experts of a token, shared ones included.
    pub fn places(self) -> u32 {
        self.top_k.saturating_add(self.shared)
    }
}

/// One expert per token, whose weight is its share of the softmax over all experts.
impl Default for RouterConfig {
    fn default() -> Self {
        Self {
            top_k: 1,
            normalized: false,
            rounded: false,
            shared: 0,
            gated: false,
            scale: 1.0,
            routed_scale: 1.0,
            cutoff: None,
        }
    }
}

/// The kernels of all stages of routing.
#[derive(Clone, Debug)]
pub struct Router {
    topk: Arc<LoadedKernel>,
    topk_sigmoid: Arc<LoadedKernel>,
    topk_sparse_mixer: Arc<LoadedKernel>,
    sort: Arc<LoadedKernel>,
    combine: Arc<LoadedKernel>,
    /// The bias that is added to scores before experts are chosen.
    correction: Option<Arc<DeviceBuffer<f32>>>,
}

/// Returns the variant of a stage on an architecture.
pub(crate) fn variant(arch: Arch, stage: RouteStage) -> VariantSpec {
    VariantSpec::route(arch, RouteSpec { stage, pdl: arch.has(Instruction::DependentLaunch) })
}

impl Router {
    /// Compiles or finds the kernels.
    ///
    /// # Errors
    /// A kernel cannot be compiled or loaded, or the device failed.
    pub fn of(kernels: &KernelSet) -> Result<Self, DeviceError> {
        let arch = kernels.device().info().arch;
        let stage = |stage| {
            let kernel = kernels.get(&variant(arch, stage))?;
            match kernel.spec().op {
                Op::Route(spec) if spec.stage == stage => Ok(kernel),
                _ => kernel.refuse(LaunchError::Family { wanted: "a routing kernel of this stage" }),
            }
        };
        Ok(Self {
            topk: stage(RouteStage::Topk)?,
            topk_sigmoid: stage(RouteStage::TopkSigmoid)?,
            topk_sparse_mixer: stage(RouteStage::TopkSparseMixer)?,
            sort: stage(RouteStage::Sort)?,
            combine: stage(RouteStage::Combine)?,
            correction: None,
        })
    }

    /// Sets the correction bias, an element per expert without shared ones. Scores are then the sigmoids of logits
    /// instead of shares of the softmax, and the experts with the largest sums of score and bias are chosen.
    pub(crate) fn set_correction(&mut self, bias: DeviceBuffer<f32>) {
        self.correction = Some(Arc::new(bias));
    }

    /// Returns the bytes of the correction bias; 0 without one.
    pub(crate) fn bytes(&self) -> u64 {
        self.correction.as_ref().map_or(0, |bias| bias.bytes() as u64)
    }

    /// Returns a routing error that names the sorting kernel.
    pub(crate) fn refuse<T>(&self, refusal: LaunchError) -> Result<T, DeviceError> {
        self.sort.refuse(refusal)
    }

    /// Enqueues the choice among `experts` experts, the last of which may be shared: the `top_k` largest of each row of
    /// `logits`, of equal logits the lower expert first, and then the shared ones. Logits are `[tokens, experts without
    /// shared ones]`, and one column more if these are gated. `ids` and `weights` have at least `tokens` times
    /// [`RouterConfig::places`] elements. With a correction bias, scores decide instead of logits; such a router cannot
    /// be a SparseMixer.
    ///
    /// # Errors
    /// Operands of other sizes or on another device, or a driver error.
    pub fn choose(
        &self,
        stream: &Stream,
        logits: MatrixRef<'_>,
        experts: u32,
        choice: RouterConfig,
        (ids, weights): (&mut DeviceBuffer<u32>, &mut DeviceBuffer<f32>),
    ) -> Result<(), DeviceError> {
        let correction = self.correction.as_deref();
        let kernel = match (correction, choice.cutoff) {
            (Some(_), _) => &self.topk_sigmoid,
            (None, Some(_)) => &self.topk_sparse_mixer,
            (None, None) => &self.topk,
        };
        let (desc, routed) = (logits.desc(), experts.saturating_sub(choice.shared));
        let check = || {
            check(experts, choice.places())?;
            let cols = routed.saturating_add(choice.gated.into());
            if desc.cols != cols || choice.top_k == 0 || choice.top_k > routed {
                return Err(LaunchError::Experts { experts: desc.cols, top_k: choice.top_k });
            }
            match correction {
                Some(_) if choice.cutoff.is_some() => {
                    return Err(LaunchError::Family { wanted: "a router without a correction bias" });
                }
                Some(bias) => {
                    check_device("the correction bias", bias.device().ordinal(), kernel.device().ordinal())?;
                    check_capacity("correction bias", bias.len(), routed as usize)?;
                }
                None if choice.routed_scale != 1.0 => return Err(LaunchError::RoutedScale(choice.routed_scale)),
                None => {}
            }
            desc.check_device("logits", kernel.device().ordinal())?;
            let pairs = desc.rows as usize * choice.places() as usize;
            check_capacity("ids", ids.len(), pairs)?;
            check_capacity("weights of experts", weights.len(), pairs)
        };
        check().or_else(|refusal| kernel.refuse(refusal))?;
        let args = RouteArgs {
            logits: desc.address,
            ids: ids.address(),
            weights: weights.address(),
            logits_pitch: desc.pitch,
            tokens: desc.rows,
            experts: routed,
            top_k: choice.top_k,
            shared: choice.shared,
            gated: choice.gated.into(),
            scale: choice.scale,
            normalized: choice.normalized.into(),
            rounded: choice.rounded.into(),
            products: correction.map_or(0, DeviceBuffer::address),
            routed_scale: choice.cutoff.unwrap_or(choice.routed_scale),
            ..RouteArgs::default()
        };
        // SAFETY: sizes were checked above; dropping a buffer waits for the kernel.
        unsafe { kernel.launch(stream, GemmShape::rows(desc.rows), &args) }
    }

    /// Enqueues the lists of pairs by expert.
    ///
    /// # Safety
    /// The addresses of `args` point to memory of the sizes that its counts require, which stays allocated until the
    /// work is done.
    pub(crate) unsafe fn sort(&self, stream: &Stream, args: &RouteArgs) -> Result<(), DeviceError> {
        // SAFETY: the caller's promise.
        unsafe { self.sort.launch(stream, GemmShape::rows(1), args) }
    }

    /// Enqueues the sums of each token's rows.
    ///
    /// # Safety
    /// As for [`Router::sort`].
    pub(crate) unsafe fn combine(&self, stream: &Stream, args: &RouteArgs) -> Result<(), DeviceError> {
        let problem = GemmShape { m: args.tokens, n: args.columns, k: 0 };
        // SAFETY: the caller's promise.
        unsafe { self.combine.launch(stream, problem, args) }
    }
}

/// Checks that routing supports this number of experts, and this number per token.
pub(crate) fn check(experts: u32, top_k: u32) -> Result<(), LaunchError> {
    if (1..=RouteSpec::EXPERTS_MAX).contains(&experts) && (1..=RouteSpec::TOP_K_MAX).contains(&top_k) {
        Ok(())
    } else {
        Err(LaunchError::Experts { experts, top_k })
    }
}
