//! Checks that need no knowledge of kernel families: the item, integer overflow, repeated keys, and `crate`. Each error
//! is reported on the token that breaks the rule, and says what would be right. `unweight-codegen` checks keys and
//! values.

use crate::attr::{Pair, Value};
use proc_macro2::TokenStream;
use syn::{Data, DeriveInput, Error, Fields, Ident, Path, Result, parse2, spanned::Spanned};

/// A checked attribute, ready to expand.
pub(crate) struct Variant {
    /// The path of the code generator.
    pub codegen: Path,
    /// The struct.
    pub name: Ident,
    /// Every pair but `crate`.
    pub pairs: Vec<Pair>,
}

/// Checks the pairs and the item; reports all errors at once. `codegen` is the default path of the code generator.
pub(crate) fn check(pairs: Vec<Pair>, item: &TokenStream, codegen: &Path) -> Result<Variant> {
    let mut errors = Errors(None);
    let name = errors.record(unit_struct(item));
    for (index, pair) in pairs.iter().enumerate() {
        if pairs[..index].iter().any(|earlier| earlier.key == pair.key) {
            errors.push(Error::new(pair.key.span(), format!("`{}` is given twice", pair.key)));
        }
        if let Value::Int(number) = &pair.value
            && number.base10_parse::<u32>().is_err()
        {
            let message = format!("`{}` takes an integer up to {}", pair.key, u32::MAX);
            errors.push(Error::new(number.span(), message));
        }
    }
    let codegen = errors.record(crate_path(&pairs, codegen));
    match (errors.0, name, codegen) {
        (None, Some(name), Some(codegen)) => {
            let pairs = pairs.into_iter().filter(|pair| pair.key != "crate").collect();
            Ok(Variant { codegen, name, pairs })
        }
        (error, ..) => {
            Err(error.unwrap_or_else(|| Error::new_spanned(item, "the attribute does not declare a variant")))
        }
    }
}

/// Returns the name of the unit struct. A variant has no fields, because it is a type and never a value.
fn unit_struct(item: &TokenStream) -> Result<Ident> {
    const REQUIRES_UNIT_STRUCT: &str = "unweight_variant requires a unit struct, such as `struct GateProjection;`";
    // `DeriveInput` parses structs, enums and unions; syn parses functions and others only with its largest feature.
    let item: DeriveInput = parse2(item.clone()).map_err(|_| Error::new_spanned(item, REQUIRES_UNIT_STRUCT))?;
    let Data::Struct(data) = &item.data else {
        return Err(Error::new_spanned(&item, REQUIRES_UNIT_STRUCT));
    };
    if !item.generics.params.is_empty() {
        return Err(Error::new_spanned(
            &item.generics,
            "a variant is one spec, so its struct cannot have generic parameters",
        ));
    }
    match &data.fields {
        Fields::Unit => Ok(item.ident.clone()),
        fields => Err(Error::new_spanned(fields, format!("a variant has no fields; write `struct {};`", item.ident))),
    }
}

/// Returns the path of the code generator as the user's crate sees it, or `default` without a `crate` key.
pub(crate) fn crate_path(pairs: &[Pair], default: &Path) -> Result<Path> {
    match pairs.iter().find(|pair| pair.key == "crate").map(|pair| &pair.value) {
        None => Ok(default.clone()),
        Some(Value::Path(path)) => Ok(path.clone()),
        Some(value) => Err(Error::new(value.span(), "`crate` takes a path, such as ::unweight::codegen")),
    }
}

/// All errors found so far, so that one build shows them all.
struct Errors(Option<Error>);

impl Errors {
    fn push(&mut self, error: Error) {
        match &mut self.0 {
            Some(all) => all.combine(error),
            none => *none = Some(error),
        }
    }

    fn record<T>(&mut self, result: Result<T>) -> Option<T> {
        result.map_err(|error| self.push(error)).ok()
    }
}
