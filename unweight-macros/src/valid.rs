//! The rules of the attribute. Each error stands on the token that breaks the rule, and says what would be right.

use crate::{
    ast::{Op, PackedKeys, Source, Variant, Word},
    attr::{Pair, Value},
};
use proc_macro2::{Span, TokenStream};
use syn::{Data, DeriveInput, Error, Fields, Ident, LitBool, LitInt, Path, Result, parse2, spanned::Spanned};

/// Keys of every operation.
const COMMON: &[&str] = &["op", "arch", "crate"];
const GEMM_RECON: &[&str] = &["n", "stages", "source", "verbatim", "epilogue"];
const DECODE: &[&str] = &["output", "code_limit"];
const STAGE: &[&str] = &["stage"];
const GEMM_MMA: &[&str] =
    &["batch_tile", "row_blocks", "warps", "stages", "cluster", "persistent", "escapes", "pdl", "epilogue", "dump"];
const GEMM_WGMMA: &[&str] =
    &["batch_tile", "warpgroups", "stages", "cluster", "stream_k", "escapes", "pdl", "epilogue", "dump"];

/// Words of the attribute and the values they stand for. Names and parsing live in `unweight_codegen::spec`; a test declares
/// every word and compares the resulting canonical name.
const ARCHES: &[(&str, &str)] = &[("sm90a", "Sm90a")];
const EPILOGUES: &[(&str, &str)] = &[("store", "Store"), ("store_add", "StoreAdd"), ("silu_mul", "SiluMul")];
const OUTPUTS: &[(&str, &str)] = &[("full", "Full"), ("exponent", "Exponent"), ("palette", "Palette")];
const ENCODE_STAGES: &[(&str, &str)] = &[
    ("stats", "Stats"),
    ("table", "Table"),
    ("decode_table", "DecodeTable"),
    ("rows", "Rows"),
    ("scan", "Scan"),
    ("write", "Write"),
    ("palette", "Palette"),
];
const REPACK_STAGES: &[(&str, &str)] = &[("pack", "Pack"), ("lists", "Lists"), ("unpack", "Unpack")];

/// Verbatim rows of a palette variant that does not say: covers nearly every tile of trained weights.
const DEFAULT_VERBATIM: u32 = 8;
/// Code limit of a decoder that does not say: the encoder's default.
const DEFAULT_CODE_LIMIT: u32 = 7;
/// Warpgroups that multiply in a wide matmul that does not say: 128 output features, as its shapes in the catalogue.
const DEFAULT_WARPGROUPS: u32 = 2;

/// The pairs as a variant, or what is wrong with the item, the keys and each of `op`, `arch`, `crate` and the family's values.
pub(crate) fn check(pairs: &[Pair], item: &TokenStream, codegen: &Path) -> Result<Variant> {
    let mut errors = Errors(None);
    let name = errors.keep(unit_struct(item));
    for (index, pair) in pairs.iter().enumerate() {
        if pairs[..index].iter().any(|earlier| earlier.key == pair.key) {
            errors.push(Error::new(pair.key.span(), format!("`{}` is given twice", pair.key)));
        }
    }
    let args = Args { pairs };
    let op = errors.keep(operation(&args));
    if let Some((op_name, allowed, _)) = &op {
        for pair in pairs {
            let key = pair.key.to_string();
            if !allowed.contains(&key.as_str()) && !COMMON.contains(&key.as_str()) {
                let keys = allowed.iter().chain(COMMON).copied().collect::<Vec<_>>().join(", ");
                errors.push(Error::new(pair.key.span(), format!("op = {op_name} has no key `{key}`; it takes {keys}")));
            }
        }
    }
    let arch = errors.keep(args.word("arch", ARCHES, Some("sm90a")));
    let codegen = errors.keep(crate_path(pairs, codegen));
    let op = op.and_then(|(_, _, build)| errors.keep(build(&args)));
    match (errors.0, name, arch, codegen, op) {
        (None, Some(name), Some(arch), Some(codegen), Some(op)) => Ok(Variant { codegen, name, arch, op }),
        (error, ..) => {
            Err(error.unwrap_or_else(|| Error::new(Span::call_site(), "the attribute does not name a variant")))
        }
    }
}

/// The struct, which carries nothing: a variant is a value of the type system, not of the program.
fn unit_struct(item: &TokenStream) -> Result<Ident> {
    const PLACE: &str = "unweight_variant goes on a unit struct, such as `struct GateProjection;`";
    // `DeriveInput` reads structs, enums and unions; syn reads functions and the rest only with its largest feature.
    let item: DeriveInput = parse2(item.clone()).map_err(|_| Error::new_spanned(item, PLACE))?;
    let Data::Struct(data) = &item.data else {
        return Err(Error::new_spanned(&item, PLACE));
    };
    if !item.generics.params.is_empty() {
        return Err(Error::new_spanned(
            &item.generics,
            "a variant is one spec, so its struct takes no generic parameters",
        ));
    }
    match &data.fields {
        Fields::Unit => Ok(item.ident.clone()),
        fields => Err(Error::new_spanned(fields, format!("a variant has no fields; write `struct {};`", item.ident))),
    }
}

type Build = fn(&Args<'_>) -> Result<Op>;

/// The operation: its name, its keys and what reads them.
fn operation(args: &Args<'_>) -> Result<(&'static str, &'static [&'static str], Build)> {
    const OPS: &[(&str, &[&str], Build)] = &[
        ("gemm_recon", GEMM_RECON, gemm_recon),
        ("decode", DECODE, decode),
        ("encode", STAGE, encode),
        ("gemm_mma", GEMM_MMA, gemm_mma),
        ("gemm_wgmma", GEMM_WGMMA, gemm_wgmma),
        ("repack", STAGE, repack),
    ];
    let Some((word, span)) = args.text("op")? else { return Ok(OPS[0]) };
    match OPS.iter().find(|(name, ..)| *name == word) {
        Some(op) => Ok(*op),
        None => Err(Error::new(span, format!("unknown op `{word}`; it must be {}", one_of(OPS.iter().map(|op| op.0))))),
    }
}

fn gemm_recon(args: &Args<'_>) -> Result<Op> {
    let source = match args.text("source")? {
        None => Source::Palette { verbatim: args.int("verbatim", Some(DEFAULT_VERBATIM))? },
        Some((word, _)) if word == "palette" => {
            Source::Palette { verbatim: args.int("verbatim", Some(DEFAULT_VERBATIM))? }
        }
        Some((word, _)) if word == "exponent" => match args.find("verbatim") {
            None => Source::Exponent,
            Some(pair) => {
                let message = "`verbatim` needs source = palette: decoded exponents have no verbatim rows";
                return Err(Error::new(pair.key.span(), message));
            }
        },
        Some((word, span)) => {
            return Err(Error::new(span, format!("unknown source `{word}`; it must be palette or exponent")));
        }
    };
    Ok(Op::GemmRecon {
        n: args.int("n", None)?,
        stages: args.int("stages", None)?,
        source,
        epilogue: args.word("epilogue", EPILOGUES, Some("store"))?,
    })
}

fn decode(args: &Args<'_>) -> Result<Op> {
    Ok(Op::Decode {
        output: args.word("output", OUTPUTS, None)?,
        code_limit: args.int("code_limit", Some(DEFAULT_CODE_LIMIT))?,
    })
}

fn encode(args: &Args<'_>) -> Result<Op> {
    Ok(Op::Encode { stage: args.word("stage", ENCODE_STAGES, None)? })
}

fn gemm_mma(args: &Args<'_>) -> Result<Op> {
    Ok(Op::GemmMma {
        batch_tile: args.int("batch_tile", None)?,
        row_blocks: args.int("row_blocks", None)?,
        warps: args.int("warps", None)?,
        cluster: args.int("cluster", Some(1))?,
        persistent: args.bool("persistent", false)?,
        packed: packed(args)?,
    })
}

fn gemm_wgmma(args: &Args<'_>) -> Result<Op> {
    Ok(Op::GemmWgmma {
        batch_tile: args.int("batch_tile", None)?,
        warpgroups: args.int("warpgroups", Some(DEFAULT_WARPGROUPS))?,
        cluster: args.int("cluster", Some(1))?,
        stream_k: args.bool("stream_k", false)?,
        packed: packed(args)?,
    })
}

/// Any tensor, any stream: with escapes, and launched behind whatever came before.
fn packed(args: &Args<'_>) -> Result<PackedKeys> {
    Ok(PackedKeys {
        stages: args.int("stages", None)?,
        escapes: args.bool("escapes", true)?,
        pdl: args.bool("pdl", false)?,
        dump: args.bool("dump", false)?,
        epilogue: args.word("epilogue", EPILOGUES, Some("store"))?,
    })
}

fn repack(args: &Args<'_>) -> Result<Op> {
    Ok(Op::Repack { stage: args.word("stage", REPACK_STAGES, None)? })
}

struct Args<'a> {
    pairs: &'a [Pair],
}

impl Args<'_> {
    fn find(&self, key: &str) -> Option<&Pair> {
        self.pairs.iter().find(|pair| pair.key == key)
    }

    /// The value of a key as one word.
    fn text(&self, key: &str) -> Result<Option<(String, Span)>> {
        match self.find(key).map(|pair| &pair.value) {
            None => Ok(None),
            Some(Value::Path(path)) => match path.get_ident() {
                Some(word) => Ok(Some((word.to_string(), word.span()))),
                None => Err(Error::new(path.span(), format!("`{key}` takes one word"))),
            },
            Some(Value::Int(number)) => Err(Error::new(number.span(), format!("`{key}` takes a word"))),
            Some(Value::Bool(value)) => Err(Error::new(value.span(), format!("`{key}` takes a word"))),
        }
    }

    /// The value of a key as a value of an enum.
    fn word(&self, key: &str, words: &[(&str, &str)], default: Option<&str>) -> Result<Word> {
        let (text, span) = match (self.text(key)?, default) {
            (Some(found), _) => found,
            (None, Some(default)) => (default.to_owned(), Span::call_site()),
            (None, None) => return Err(missing(key, &one_of(words.iter().map(|word| word.0)))),
        };
        match words.iter().find(|(word, _)| *word == text) {
            Some((_, value)) => Ok(Word(Ident::new(value, span))),
            None => {
                let words = one_of(words.iter().map(|word| word.0));
                Err(Error::new(span, format!("unknown {key} `{text}`; it must be {words}")))
            }
        }
    }

    /// The value of a key as an unsigned number; its range is judged by the expansion.
    fn int(&self, key: &str, default: Option<u32>) -> Result<LitInt> {
        match self.find(key).map(|pair| &pair.value) {
            Some(Value::Int(number)) => {
                let value: u32 = number
                    .base10_parse()
                    .map_err(|_| Error::new(number.span(), format!("`{key}` takes an integer up to {}", u32::MAX)))?;
                // Without the user's suffix: `2usize` must not become a type error of the expansion.
                Ok(LitInt::new(&value.to_string(), number.span()))
            }
            Some(Value::Bool(value)) => Err(Error::new(value.span(), format!("`{key}` takes an integer"))),
            Some(Value::Path(path)) => Err(Error::new(path.span(), format!("`{key}` takes an integer"))),
            None => match default {
                Some(value) => Ok(LitInt::new(&value.to_string(), Span::call_site())),
                None => Err(missing(key, "an integer")),
            },
        }
    }

    /// The value of a key as true or false.
    fn bool(&self, key: &str, default: bool) -> Result<LitBool> {
        let wrong = |span| Err(Error::new(span, format!("`{key}` takes true or false")));
        match self.find(key).map(|pair| &pair.value) {
            Some(Value::Bool(value)) => Ok(value.clone()),
            Some(Value::Int(number)) => wrong(number.span()),
            Some(Value::Path(path)) => wrong(path.span()),
            None => Ok(LitBool::new(default, Span::call_site())),
        }
    }
}

/// Where the code generator is, as the user's crate sees it: `default` where the attribute does not say.
pub(crate) fn crate_path(pairs: &[Pair], default: &Path) -> Result<Path> {
    const CRATE: &str = "`crate` takes a path, such as ::unweight::codegen";
    let args = Args { pairs };
    match args.find("crate").map(|pair| &pair.value) {
        None => Ok(default.clone()),
        Some(Value::Path(path)) => Ok(path.clone()),
        Some(Value::Int(number)) => Err(Error::new(number.span(), CRATE)),
        Some(Value::Bool(value)) => Err(Error::new(value.span(), CRATE)),
    }
}

fn missing(key: &str, value: &str) -> Error {
    Error::new(Span::call_site(), format!("`{key}` is missing; it takes {value}"))
}

/// "a, b or c"
fn one_of<'a>(words: impl Iterator<Item = &'a str>) -> String {
    let words: Vec<_> = words.collect();
    match words.as_slice() {
        [] => String::new(),
        [only] => (*only).to_owned(),
        [rest @ .., last] => format!("{} or {last}", rest.join(", ")),
    }
}

/// Errors found so far, so that one build shows them all.
struct Errors(Option<Error>);

impl Errors {
    fn push(&mut self, error: Error) {
        match &mut self.0 {
            Some(all) => all.combine(error),
            none => *none = Some(error),
        }
    }

    fn keep<T>(&mut self, result: Result<T>) -> Option<T> {
        result.map_err(|error| self.push(error)).ok()
    }
}
