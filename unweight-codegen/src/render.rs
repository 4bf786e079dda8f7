//! Spec to source: the only file that names tera.
//!
//! ```text
//! spec --Plan::new--> plan --context--> typed struct --tera--> text --lint--> Source
//! ```
//!
//! Templates use the delimiters `<% %>`, `<$ $>` and `<# #>`, because CUDA and PTX are full of braces, brackets and `<<`. Nothing is
//! escaped. A value that a context lacks is an error of the template's line, never an empty string.

use crate::{
    context::{DecodeContext, EncodeContext, GemmMmaContext, GemmReconContext, GemmWgmmaContext, RepackContext},
    error::CodegenError,
    lint,
    plan::Plan,
    source::{Source, closure},
    spec::{Op, VariantSpec},
};
use serde::Serialize;
use std::sync::LazyLock;
use tera::{Context, Delimiters, Tera};

/// Templates are parsed once; a parse error is kept and reported by every render.
static ENGINE: LazyLock<Result<Tera, String>> = LazyLock::new(|| {
    engine(unweight_templates::kernels().iter().chain(unweight_templates::partials()).copied())
        .map_err(|error| error.to_string())
});

/// A tera for CUDA with the given templates.
fn engine<'a>(templates: impl Iterator<Item = (&'a str, &'a str)>) -> tera::TeraResult<Tera> {
    let mut tera = Tera::new();
    tera.autoescape_on(Vec::<&'static str>::new());
    tera.set_delimiters(Delimiters {
        block_start: "<%".into(),
        block_end: "%>".into(),
        variable_start: "<$".into(),
        variable_end: "$>".into(),
        comment_start: "<#".into(),
        comment_end: "#>".into(),
    })?;
    // All at once: a template may include a partial that comes after it.
    tera.add_raw_templates(templates)?;
    Ok(tera)
}

/// The source of a variant. Deterministic: equal specs give equal bytes.
///
/// ```
/// # use unweight_codegen::{render, spec::VariantSpec};
/// let spec: VariantSpec = "uw_sm90a_decode_full_l7".parse()?;
/// let source = render(&spec)?;
/// assert!(source.text.contains("uw_sm90a_decode_full_l7(const __grid_constant__ uw::DecodeArgs args)"));
/// assert!(source.headers.iter().any(|(name, _)| *name == "unweight/kernels/decode.cuh"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn render(spec: &VariantSpec) -> Result<Source, CodegenError> {
    let plan = Plan::new(spec)?;
    let text = match spec.op {
        Op::Decode(decode) => text(spec, "decode.cu.tera", &DecodeContext::new(&plan, &decode))?,
        Op::GemmRecon(matmul) => text(spec, "gemm_recon.cu.tera", &GemmReconContext::new(&plan, &matmul))?,
        Op::Encode(encode) => text(spec, "encode.cu.tera", &EncodeContext::new(&plan, &encode))?,
        Op::GemmMma(small) => text(spec, "gemm_mma.cu.tera", &GemmMmaContext::new(&plan, &small))?,
        Op::GemmWgmma(wide) => text(spec, "gemm_wgmma.cu.tera", &GemmWgmmaContext::new(&plan, &wide))?,
        Op::Repack(packed) => text(spec, "repack.cu.tera", &RepackContext::new(&plan, &packed))?,
    };
    let name = spec.name();
    lint::kernel(&name, &text)?;
    Ok(Source { headers: closure(&name, &text)?, name: name.to_string(), text, options: options(spec) })
}

/// What the text needs of a compiler to mean what it says.
fn options(spec: &VariantSpec) -> Vec<String> {
    vec![format!("--gpu-architecture={}", spec.arch.compiler_name()), "--std=c++17".to_owned()]
}

fn text(spec: &VariantSpec, template: &'static str, context: &impl Serialize) -> Result<String, CodegenError> {
    let failed = |message: String| CodegenError::Template { template, variant: spec.to_string(), message };
    let engine = ENGINE.as_ref().map_err(|message| failed(message.clone()))?;
    let context = Context::from_serialize(context).map_err(|error| failed(error.to_string()))?;
    engine.render(template, &context).map_err(|error| failed(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::catalog;

    #[derive(Serialize)]
    struct One {
        value: &'static str,
    }

    fn render_text(template: &str) -> Result<String, String> {
        let tera = engine([("t", template)].into_iter()).map_err(|e| e.to_string())?;
        let context = Context::from_serialize(&One { value: "a < b && c > \"d\" & 'e'" }).unwrap();
        tera.render("t", &context).map_err(|e| e.to_string())
    }

    #[test]
    fn nothing_is_escaped_and_cuda_passes_through() {
        let cuda = "k<<<1, 2>>>(a[%0], {{0}}, {%0}, \"=r\"(x), a < b && c); // {# #} <T> & ' \"\n";
        assert_eq!(render_text(cuda).unwrap(), cuda);
        assert_eq!(render_text("<$ value $>").unwrap(), "a < b && c > \"d\" & 'e'");
        assert_eq!(render_text("a<# gone #>b").unwrap(), "ab");
    }

    #[test]
    fn a_value_that_is_missing_is_an_error_with_its_place() {
        let error = render_text("\n  <$ wert $>").unwrap_err();
        assert!(error.contains("wert") && error.contains("2:"), "{error}");
    }

    #[test]
    fn rendering_is_deterministic() {
        for spec in catalog::all() {
            assert_eq!(render(&spec).unwrap(), render(&spec).unwrap());
        }
    }

    #[test]
    fn sources_name_no_place() {
        for spec in catalog::all() {
            let source = render(&spec).unwrap();
            assert!(!source.text.contains(env!("CARGO_MANIFEST_DIR")));
        }
    }
}
