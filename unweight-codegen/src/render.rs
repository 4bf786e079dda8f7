//! Renders a spec to its source. No other file uses tera.
//!
//! ```text
//! spec --Plan::new--> plan --axes, Family::entry--> EntryPoint --tera--> text --lint--> Source
//! ```
//!
//! One template, `kernels/kernel.cu.tera`, writes the entry point of every kernel from the fields of `EntryPoint`. It
//! uses the delimiters `<% %>`, `<$ $>` and `<# #>`, because CUDA and PTX are full of braces, brackets and `<<`.
//! Nothing is escaped. A value missing from the context is an error with the template's line, never an empty string.

use crate::{
    error::CodegenError,
    external::ExternalSource,
    family::{Check, Constant, constant_name},
    lint,
    plan::{Plan, SmemSection},
    source::{Source, closure, digest_of},
    spec::{Arch, VariantSpec, catalog},
};
use serde::Serialize;
use std::sync::{LazyLock, OnceLock};
use tera::{Context, Delimiters, Tera};
use unweight_format::Digest;

/// Templates are parsed once; a parse error is kept and reported by every render.
static ENGINE: LazyLock<Result<Tera, String>> =
    LazyLock::new(|| engine(unweight_templates::kernels().iter().copied()).map_err(|error| error.to_string()));

/// Creates a tera engine with these templates and with delimiters for CUDA.
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
    tera.add_raw_templates(templates)?;
    Ok(tera)
}

/// Returns the source of a variant. Deterministic: equal specs have equal bytes.
///
/// ```
/// # use unweight_codegen::{render, spec::VariantSpec};
/// let spec: VariantSpec = "uw_sm90a_decode_huffman_full_l7".parse()?;
/// let source = render(&spec)?;
/// let entry = "uw_sm90a_decode_huffman_full_l7(const __grid_constant__ uw::DecodeHuffmanArgs args)";
/// assert!(source.text.contains(entry));
/// assert!(source.headers.iter().any(|(name, _)| *name == "unweight/kernels/decode_huffman.cuh"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn render(spec: &VariantSpec) -> Result<Source, CodegenError> {
    let plan = Plan::new(spec)?;
    let text = text(&plan)?;
    let name = spec.name();
    lint::kernel(&name, &text)?;
    Ok(Source { headers: closure(&name, &text, &[])?, name: name.to_string(), text, options: options(spec.arch) })
}

/// Returns a digest of the inputs of all kernels that ship for an architecture: their texts, options, and every header,
/// included or not. Computed once per process, in a few milliseconds.
///
/// ```
/// # use unweight_codegen::{catalog_digest, spec::Arch};
/// assert_eq!(catalog_digest(Arch::Sm90a), catalog_digest(Arch::Sm90a));
/// assert_ne!(catalog_digest(Arch::Sm90a), catalog_digest(Arch::Sm80));
/// ```
pub fn catalog_digest(arch: Arch) -> Digest {
    static DIGESTS: [OnceLock<Digest>; Arch::ALL.len()] = [const { OnceLock::new() }; Arch::ALL.len()];
    let compute = || {
        let texts = catalog::all(arch).into_iter().map(|spec| {
            // A variant without a plan contributes only its name.
            let text = Plan::new(&spec).ok().and_then(|plan| text(&plan).ok()).unwrap_or_default();
            (spec.to_string(), text)
        });
        catalog_digest_of(arch, texts, unweight_templates::headers())
    };
    match Arch::ALL.iter().position(|other| *other == arch) {
        Some(at) => *DIGESTS[at].get_or_init(compute),
        None => compute(),
    }
}

/// Skips lint and the closure of headers of each kernel, which take longer than all the texts.
fn catalog_digest_of(
    arch: Arch,
    texts: impl Iterator<Item = (String, String)>,
    headers: &[(&'static str, &'static str)],
) -> Digest {
    let (options, texts) = (options(arch), texts.collect::<Vec<_>>());
    let texts = texts.iter().flat_map(|(name, text)| [name.as_str(), text.as_str()]);
    let headers = headers.iter().flat_map(|(name, text)| [*name, *text]);
    digest_of(options.iter().map(String::as_str).chain(texts).chain(headers))
}

/// Compiler options that the meaning of the text depends on.
fn options(arch: Arch) -> Vec<String> {
    vec![format!("--gpu-architecture={}", arch.compiler_name()), "--std=c++17".to_owned()]
}

fn text(plan: &Plan) -> Result<String, CodegenError> {
    EntryPoint::of(plan).render()
}

impl ExternalSource {
    /// Returns the source. Deterministic: equal values have equal bytes.
    ///
    /// # Errors
    /// A header violates a rule of [`lint`], or includes a header that does not exist.
    pub fn render(&self) -> Result<Source, CodegenError> {
        let name = self.name();
        for (header, text) in self.headers {
            lint::plain_text_with(header, text, self.headers)?;
        }
        let text = EntryPoint::of_external(self).render()?;
        lint::kernel_with(&name, &text, self.headers)?;
        let headers = closure(&name, &text, self.headers)?;
        Ok(Source { headers, name, text, options: options(self.arch) })
    }
}

/// The context of the template.
#[derive(Serialize)]
struct EntryPoint {
    /// Canonical name and symbol.
    name: String,
    /// A one-line description of the kernel.
    summary: String,
    /// The grid rule, in words.
    grid: String,
    /// Threads of a block.
    threads: u32,
    /// Blocks that must fit one SM: the second number of `__launch_bounds__`.
    blocks_per_sm: u32,
    /// Dynamic shared memory of a block.
    smem_bytes: u32,
    /// The sections of shared memory, in address order.
    sections: Vec<Section>,
    /// The argument struct.
    args: &'static str,
    /// `sizeof` the argument struct on the host.
    args_bytes: usize,
    /// The header that holds the kernel.
    header: String,
    /// The kernel's namespace in `uw`.
    namespace: String,
    /// The function in that namespace.
    function: &'static str,
    /// The fields of `Config`.
    constants: Vec<Constant>,
    /// Equations between host and kernel, in addition to arguments, shared memory and threads.
    checks: Vec<Check>,
}

/// The expected offset of a section of shared memory in the kernel.
#[derive(Serialize)]
struct Section {
    /// The constant of the kernel's `Smem` with the offset: `kSourceBarriers` for `source_barriers`.
    constant: String,
    /// Bytes from the start of dynamic shared memory.
    offset: u32,
}

impl Section {
    fn new(section: &SmemSection) -> Self {
        Self { constant: constant_name(section.name), offset: section.offset }
    }
}

impl EntryPoint {
    /// The name of the only template.
    const TEMPLATE: &str = "kernel.cu.tera";

    fn of(plan: &Plan) -> Self {
        let (op, launch) = (plan.spec.op, plan.launch);
        let block = plan.block();
        let (family, entry) = (op.info(), op.entry(&block));
        Self {
            name: plan.spec.to_string(),
            summary: op.summary(&block),
            grid: launch.grid.to_string(),
            threads: launch.threads,
            blocks_per_sm: launch.blocks_per_sm,
            smem_bytes: plan.smem.bytes(),
            sections: plan.smem.sections().iter().map(Section::new).collect(),
            args: family.args.name,
            args_bytes: family.args.bytes,
            header: entry.header(family.name),
            namespace: entry.namespace(family.name),
            function: "run",
            constants: entry.constants(family.axes, op.values()),
            checks: entry.checks().to_vec(),
        }
    }

    fn of_external(kernel: &ExternalSource) -> Self {
        Self {
            name: kernel.name(),
            summary: kernel.summary.to_owned(),
            grid: kernel.grid.to_owned(),
            threads: kernel.threads,
            blocks_per_sm: kernel.blocks_per_sm,
            smem_bytes: kernel.smem.bytes(),
            sections: kernel.smem.sections().iter().map(Section::new).collect(),
            args: kernel.args.name,
            args_bytes: kernel.args.bytes,
            header: kernel.header.to_owned(),
            namespace: kernel.family.to_owned(),
            function: kernel.function,
            constants: kernel.constants.iter().map(|(name, value)| Constant::number(name, *value)).collect(),
            checks: Vec::new(),
        }
    }

    fn render(&self) -> Result<String, CodegenError> {
        let template = Self::TEMPLATE;
        let failed = |message| CodegenError::Template { template, variant: self.name.clone(), message };
        let engine = ENGINE.as_ref().map_err(|message| failed(message.clone()))?;
        let context = Context::from_serialize(self).map_err(|error| failed(error.to_string()))?;
        engine.render(template, &context).map_err(|error| failed(error.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::Arch;

    #[derive(Serialize)]
    struct One {
        value: &'static str,
    }

    fn render_text(template: &str) -> Result<String, String> {
        let tera = engine([("t", template)].into_iter()).map_err(|e| e.to_string())?;
        let context = Context::from_serialize(&One { value: "a < b && c > \"d\" & 'e'" }).unwrap();
        tera.render("t", &context).map_err(|e| e.to_string())
    }

    /// A change of one letter in a text, a header or a name changes the digest.
    #[test]
    fn digest_covers_the_whole_translation_unit() {
        let texts = |text: &str| [("a".to_owned(), text.to_owned()), ("b".to_owned(), "y".to_owned())];
        let of = |text: &str, headers: &[(&'static str, &'static str)]| {
            catalog_digest_of(Arch::Sm90a, texts(text).into_iter(), headers)
        };
        let (h, none) = ([("h", "one")], []);
        let digests = [
            of("x", &h),
            of("z", &h),
            of("x", &[("h", "two")]),
            of("x", &[("i", "one")]),
            of("x", &none),
            catalog_digest_of(Arch::Sm80, texts("x").into_iter(), &h),
            catalog_digest_of(Arch::Sm90a, texts("x").into_iter().rev(), &h),
        ];
        for (at, digest) in digests.iter().enumerate() {
            assert!(!digests[..at].contains(digest), "{at}");
        }
        let rendered = |spec: &VariantSpec| render(spec).map(|source| source.text).unwrap_or_default();
        let texts = catalog::all(Arch::Sm90a).into_iter().map(|spec| (spec.to_string(), rendered(&spec)));
        assert_eq!(catalog_digest(Arch::Sm90a), catalog_digest_of(Arch::Sm90a, texts, unweight_templates::headers()));
    }

    #[test]
    fn templates_escape_nothing() {
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
        for spec in Arch::ALL.iter().flat_map(|arch| catalog::all(*arch)) {
            assert_eq!(render(&spec).unwrap(), render(&spec).unwrap());
        }
    }

    #[test]
    fn sources_contain_no_paths() {
        for spec in Arch::ALL.iter().flat_map(|arch| catalog::all(*arch)) {
            let source = render(&spec).unwrap();
            assert!(!source.text.contains(env!("CARGO_MANIFEST_DIR")));
        }
    }
}
