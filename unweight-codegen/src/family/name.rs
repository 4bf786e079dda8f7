//! Canonical names. One string is the kernel's symbol, cache directory, log line and benchmark row.
//!
//! ```text
//! uw_<arch>_decode_huffman_<full|exponent|palette>[_<e4m3|e5m2|f16|f32>]_l<code limit>[_async][_w<warps>]
//! uw_<arch>_encode_huffman_<stats|table|rows|scan|write|palette>
//! uw_<arch>_pack_<tiles|lists>
//! uw_<arch>_unpack
//! uw_<arch>_update_<places|count|tiles|lists>
//! uw_<arch>_encode_compact_<quads|sizes|write>
//! uw_<arch>_decode_compact_<full|packed|lists>
//! uw_<arch>_gemm_recon_exponent_n<n tiles>p<stages>[s<splits>]_<store|store_add>
//! uw_<arch>_gemm_recon_palette_n<n tiles>p<stages>[s<splits>]_v<verbatim rows>_<store|store_add>
//! uw_<arch>_gemm_join_<exponent|palette>_b<batch tile>_r<row blocks>w<warps>p<stages>c<cluster>_<store|store_add>
//! uw_<arch>_gemm_mma_b<batch tile>_r<row blocks>w<warps>p<stages>c<cluster>
//!                                    [_async][_persistent][_esc][_pdl]_<store|store_add|silu_mul>[_dump]
//! uw_<arch>_gemm_wgmma_b<batch tile>_g<warpgroups>p<stages>[c<cluster>]
//!                                    [_streamk][_esc][_pdl]_<store|store_add|silu_mul>[_dump]
//! uw_<arch>_gemm_compact_b<batch tile>_w<warps>p<stages>c<cluster>[_t<tables>]
//!                                    [_persistent][_pdl]_<store|store_add|silu_mul>
//! uw_<arch>_gemm_grouped_b<batch tile>_r<row blocks>w<warps>p<stages>[_bf16][_pdl]_<store|silu_mul>
//! uw_<arch>_embed_<bf16|packed>[_pdl]
//! uw_<arch>_norm_t<threads>[_rms_once|_layer|_rms_plus_one][_add][_pdl]
//! uw_<arch>_rope_d<head dim>[_adjacent][_plus_one][_pdl]
//! uw_<arch>_silu_mul_t<threads>[_gelu][_pdl]
//! uw_<arch>_scale_<mul|add|cap>[_pdl]
//! uw_<arch>_route_<topk|sort|combine>[_pdl]
//! uw_<arch>_attention_<decode|prefill>_d<head dim>_w<warps>p<stages>c<cluster>
//!                                    [_split][_packed][_async][_adjacent][_softcap][_plus_one][_pdl]
//! uw_<arch>_kv_pack_<step|chunk|release>_d<head dim>[_pdl]
//! uw_<arch>_kv_unpack_d<head dim>[_pdl]
//! uw_<arch>_sample_t1024_c<cluster>[_adjusted][_pdl]
//! uw_<arch>_logprobs_t1024[_pdl]
//! ```
//!
//! The axes follow the family's name in their order, each with its mark. `parse(name(x)) == x` for every spec, and only
//! canonical names parse: `l07` is not a name.

use super::{FAMILIES, FamilyInfo, Op, VariantSpec};
use crate::{
    axes::{AXES_MAX, Arch, Axis, Raw, Values},
    text::{Name, one_of},
};
use std::{fmt, str::FromStr};

/// The error for a string that is not the name of a variant.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "variant name {name:?}: {why}; names look like uw_sm90a_gemm_recon_palette_n2p4_v8_store, \
     uw_sm90a_gemm_mma_b8_r4w8p2c1_esc_store or uw_sm90a_decode_huffman_full_l7"
)]
pub struct ParseNameError {
    name: String,
    why: String,
}

impl ParseNameError {
    /// The stable code of this error; docs/reference/errors.md lists all.
    pub fn code(&self) -> &'static str {
        "kernel-name-invalid"
    }
}

impl VariantSpec {
    /// Returns the canonical name. Available in const context.
    pub const fn name(&self) -> Name {
        let mut name = Name::new().str("uw_").str(self.arch.tag()).str("_").str(self.op.family());
        let (axes, raw) = (self.op.info().axes, self.op.values());
        name = name.flag(!axes.is_empty(), "_");
        let mut i = 0;
        while i < axes.len() {
            let (axis, value) = (&axes[i], raw[i]);
            i += 1;
            let silent = matches!(axis.unnamed, Some(unnamed) if unnamed == value);
            if silent || !axis.exists(&raw) {
                continue;
            }
            name = match axis.values {
                Values::Flag => name.flag(value != 0, axis.mark),
                Values::Words(words) => name.str(axis.mark).str(words[value as usize]),
                Values::Range(..) | Values::Set(_) => name.str(axis.mark).num(value),
            };
        }
        name
    }
}

impl fmt::Display for VariantSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.name())
    }
}

impl FromStr for VariantSpec {
    type Err = ParseNameError;

    fn from_str(name: &str) -> Result<Self, ParseNameError> {
        let spec = parse(name).map_err(|why| ParseNameError { name: name.to_owned(), why })?;
        if spec.name().as_str() == name {
            Ok(spec)
        } else {
            Err(ParseNameError { name: name.to_owned(), why: format!("the canonical spelling is {spec}") })
        }
    }
}

fn parse(name: &str) -> Result<VariantSpec, String> {
    let rest = name.strip_prefix("uw_").ok_or("it does not begin with uw_")?;
    let (arch, rest) = rest.split_once('_').ok_or("an architecture and a family must follow uw_")?;
    let arch = Arch::from_tag(arch).ok_or_else(|| format!("unknown architecture {arch:?}"))?;
    let of = |family: &FamilyInfo| {
        let after = rest.strip_prefix(family.name)?;
        match family.axes {
            // `values` reports an error in the text after such a family.
            [] => (after.is_empty() || after.starts_with('_')).then_some(after),
            _ => after.strip_prefix('_'),
        }
    };
    let found = FAMILIES.iter().enumerate().find_map(|(index, family)| Some((index, family, of(family)?)));
    let Some((index, family, rest)) = found else {
        let names: Vec<_> = FAMILIES.iter().map(|family| family.name).collect();
        return Err(format!("unknown family in {rest:?}; it must be {}", one_of(&names)));
    };
    Ok(VariantSpec { arch, op: Op::of(index, &values(family.axes, rest)?) })
}

/// Parses the values of the axes, in their order.
fn values(axes: &[Axis], mut rest: &str) -> Result<Raw, String> {
    let mut raw = [0; AXES_MAX];
    for (i, axis) in axes.iter().enumerate() {
        if axis.exists(&raw) {
            (raw[i], rest) = value(axis, rest)?;
        }
    }
    if rest.is_empty() { Ok(raw) } else { Err(format!("it ends in {rest:?}")) }
}

/// Parses the value at the start of `rest`; returns it and the remaining text.
fn value<'a>(axis: &Axis, rest: &'a str) -> Result<(u32, &'a str), String> {
    let whole = rest;
    let marked = rest.strip_prefix(axis.mark);
    // A word ends at the end of the name, or before the next mark, which begins with `_`.
    let ends = |after: &&str| after.is_empty() || after.starts_with('_');
    match (axis.values, marked) {
        (Values::Flag, _) => match marked.filter(ends) {
            Some(rest) => Ok((1, rest)),
            None => Ok((0, rest)),
        },
        (Values::Words(words), marked) => {
            let Some(rest) = marked else {
                if let Some(value) = axis.unnamed {
                    return Ok((value, rest));
                }
                return Err(format!("{rest:?} must begin with _ and be {}", one_of(words)));
            };
            // The longest match: `store` is also a prefix of `store_add`.
            let matching = words.iter().enumerate().filter_map(|(i, word)| {
                rest.strip_prefix(word).filter(ends).map(|after| (word.len(), i as u32, after))
            });
            match (matching.max_by_key(|(length, ..)| *length), axis.unnamed) {
                (Some((_, value, after)), _) => Ok((value, after)),
                // The text belongs to a later axis.
                (None, Some(value)) => Ok((value, whole)),
                (None, None) => Err(format!("unknown {} in {rest:?}; it must be {}", axis.key, one_of(words))),
            }
        }
        (Values::Range(..) | Values::Set(_), None) => match axis.unnamed {
            Some(value) => Ok((value, rest)),
            None => Err(format!("{rest:?} must begin with {}<{}>", axis.mark, axis.key)),
        },
        (Values::Range(..) | Values::Set(_), Some(rest)) => {
            let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
            let (digits, after) = rest.split_at(end);
            let number = digits.parse().map_err(|_| format!("{} = {digits:?} is not a number", axis.key))?;
            Ok((axis.check(number).map_err(|error| error.to_string())?, after))
        }
    }
}

impl serde::Serialize for VariantSpec {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.name())
    }
}

impl<'de> serde::Deserialize<'de> for VariantSpec {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Any variant of any family: a random value for each axis.
    pub(crate) fn any_spec() -> impl Strategy<Value = VariantSpec> {
        let draws = prop::collection::vec(any::<u32>(), AXES_MAX);
        (prop::sample::select(Arch::ALL), 0..FAMILIES.len(), draws).prop_map(|(arch, family, draws)| {
            let mut raw = [0; AXES_MAX];
            for (i, axis) in FAMILIES[family].axes.iter().enumerate() {
                if axis.exists(&raw) {
                    raw[i] = match axis.values {
                        Values::Range(min, max) => min + draws[i] % (max - min + 1),
                        Values::Set(all) => all[draws[i] as usize % all.len()],
                        Values::Words(words) => draws[i] % words.len() as u32,
                        Values::Flag => draws[i] % 2,
                    };
                }
            }
            VariantSpec { arch, op: Op::of(family, &raw) }
        })
    }

    proptest! {
        #[test]
        fn names_parse_back(spec in any_spec()) {
            let name = spec.name();
            prop_assert_eq!(name.parse::<VariantSpec>().unwrap(), spec);
            prop_assert!(name.len() <= 89, "a name must not come near the end of its buffer: {}", name);
            prop_assert!(name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_'));
            let json = serde_json::to_string(&spec).unwrap();
            prop_assert_eq!(serde_json::from_str::<VariantSpec>(&json).unwrap(), spec);
        }

        #[test]
        fn different_specs_have_different_names(a in any_spec(), b in any_spec()) {
            prop_assert_eq!(a == b, a.name() == b.name());
        }

        #[test]
        fn any_text_is_refused_or_canonical(text in "(uw_)?(sm90a_)?[a-z0-9_]{0,40}") {
            if let Ok(spec) = text.parse::<VariantSpec>() {
                prop_assert_eq!(spec.to_string(), text);
            }
        }
    }

    #[test]
    fn the_names_that_documents_cite() {
        for name in [
            "uw_sm90a_gemm_recon_palette_n2p4_v8_store",
            "uw_sm90a_gemm_recon_exponent_n2p4_store_add",
            "uw_sm90a_gemm_join_palette_b8_r4w8p2c1_store",
            "uw_sm90a_gemm_join_exponent_b16_r1w16p2c2_store_add",
            "uw_sm90a_decode_huffman_full_l7",
            "uw_sm90a_decode_huffman_exponent_l12",
            "uw_sm90a_decode_huffman_full_l7_async_w16",
            "uw_sm90a_gemm_mma_b8_r4w8p2c1_esc_pdl_store",
            "uw_sm90a_gemm_mma_b64_r8w32p16c8_persistent_esc_pdl_store_add_dump",
            "uw_sm120a_gemm_mma_b64_r8w32p16c8_async_persistent_esc_pdl_store_add_dump",
            "uw_sm86_gemm_mma_b8_r2w8p3c1_async_esc_store",
            "uw_sm90a_gemm_wgmma_b128_g2p6_streamk_esc_store",
            "uw_sm90a_gemm_wgmma_b128_g2p6c2_esc_store",
            "uw_sm90a_gemm_mma_b8_r2w8p2c1_esc_silu_mul",
            "uw_sm90a_pack_lists",
            "uw_sm90a_unpack",
            "uw_sm90a_update_count",
            "uw_sm90a_encode_compact_quads",
            "uw_sm90a_decode_compact_full",
            "uw_sm90a_gemm_compact_b8_w16p1c1_pdl_silu_mul",
            "uw_sm90a_gemm_grouped_b8_r4w8p2_pdl_silu_mul",
            "uw_sm80_gemm_grouped_b64_r2w8p1_bf16_store",
            "uw_sm90a_route_combine_pdl",
        ] {
            assert_eq!(name.parse::<VariantSpec>().unwrap().to_string(), name);
        }
    }

    #[test]
    fn invalid_names_are_explained() {
        for (name, why) in [
            ("matmul", "does not begin with uw_"),
            ("uw_sm90a", "an architecture and a family must follow"),
            ("uw_sm75_encode_huffman_stats", "unknown architecture \"sm75\""),
            ("uw_sm90a_decode_huffman_full_l07", "canonical spelling is uw_sm90a_decode_huffman_full_l7"),
            ("uw_sm90a_decode_huffman_full_l5", "code_limit = 5"),
            ("uw_sm90a_decode_huffman_full_l7_w3", "warps = 3"),
            ("uw_sm90a_decode_huffman_full_l7_w0", "canonical spelling is uw_sm90a_decode_huffman_full_l7"),
            ("uw_sm90a_decode_huffman_full_l", "code_limit = \"\" is not a number"),
            ("uw_sm90a_gemm_recon_palette_n2p4_store", "\"_store\" must begin with _v<verbatim>"),
            ("uw_sm90a_gemm_recon_exponent_n2p4_v8_store", "unknown epilogue in \"v8_store\""),
            ("uw_sm90a_gemm_recon_palette_n2p4_v3_store", "verbatim = 3"),
            ("uw_sm90a_gemm_recon_exponent_n9p4_store", "n = 9"),
            ("uw_sm90a_gemm_recon_exponent_n2p4_keep", "unknown epilogue in \"keep\"; it must be store, store_add or"),
            ("uw_sm90a_gemm_recon_bitmap_n2p4_store", "unknown source in \"bitmap_n2p4_store\"; it must be"),
            ("uw_sm90a_gemm_recon_exponent_n99999999999p4_store", "is not a number"),
            (
                "uw_sm90a_convolution_x",
                "unknown family in \"convolution_x\"; it must be decode_huffman, encode_huffman",
            ),
            ("uw_sm90a_pack_palette", "unknown stage in \"palette\"; it must be tiles or lists"),
            ("uw_sm90a_unpack_lists", "it ends in \"_lists\""),
            ("uw_sm90a_pack", "unknown family in \"pack\""),
            ("uw_sm90a_gemm_medium_b8_r4w8p2c1_store", "unknown family in \"gemm_medium_"),
            ("uw_sm90a_gemm_mma_b12_r4w8p2c1_store", "batch_tile = 12"),
            ("uw_sm90a_gemm_mma_b8_r4w8p2_store", "\"_store\" must begin with c<cluster>"),
            ("uw_sm90a_gemm_mma_b8_r4w8p2c1x_store", "\"x_store\" must begin with _ and be store"),
            ("uw_sm90a_gemm_mma_b8_r4w08p2c1_store", "canonical spelling is uw_sm90a_gemm_mma_b8_r4w8p2c1_store"),
            ("uw_sm90a_gemm_mma_b8_r4w8p2c1_pdl_esc_store", "unknown epilogue in \"esc_store\""),
            ("uw_sm90a_gemm_mma_b8_r4w8p2c1_store_dumps", "it ends in \"_dumps\""),
            ("uw_sm90a_gemm_wgmma_b8_g2p4_store", "batch_tile = 8"),
            ("uw_sm90a_gemm_wgmma_b128_g4p4_store", "warpgroups = 4"),
            ("uw_sm90a_gemm_wgmma_b128_g2p6c3_store", "cluster = 3"),
            ("uw_sm90a_gemm_wgmma_b128_g2p6c1_store", "canonical spelling is uw_sm90a_gemm_wgmma_b128_g2p6_store"),
            ("", "does not begin"),
        ] {
            let message = name.parse::<VariantSpec>().unwrap_err().to_string();
            assert!(message.contains(why), "{message}");
        }
    }
}
