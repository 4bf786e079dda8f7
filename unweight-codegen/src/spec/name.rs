//! Canonical names: symbol, cache folder, snapshot, log line and bench row are this one string.
//!
//! ```text
//! uw_<arch>_decode_<full|exponent|palette>_l<code limit>
//! uw_<arch>_gemm_recon_exponent_n<n tiles>p<stages>_<store|store_add>
//! uw_<arch>_gemm_recon_palette_n<n tiles>p<stages>_v<verbatim rows>_<store|store_add>
//! uw_<arch>_encode_<stats|table|decode_table|rows|scan|write|palette>
//! uw_<arch>_gemm_mma_b<batch tile>_r<row blocks>w<warps>p<stages>c<cluster>[_persistent][_esc][_pdl]_<store|store_add|silu_mul>[_dump]
//! uw_<arch>_gemm_wgmma_b<batch tile>_g<warpgroups>p<stages>[c<cluster>][_streamk][_esc][_pdl]_<store|store_add>[_dump]
//! uw_<arch>_repack_<pack|lists|unpack>
//! ```
//!
//! `parse(name(x)) == x` for every spec, and a text that parses is the name of what it parses to: `l07` is not a name.

use super::{
    Arch, AxisError, ClusterSize, CodeLimit, DecodeOutput, EncodeStage, Epilogue, GemmMmaSpec, GemmWgmmaSpec, NTiles,
    Op, RepackStage, RowBlocks, SmallBatchTile, SmallStages, Stages, VariantSpec, VerbatimRows, Warpgroups, Warps,
    WeightSource, WideBatchTile, WideStages,
};
use crate::text::Name;
use std::{fmt, str::FromStr};

/// A text that is not the name of a variant.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "variant name {name:?}: {why}; names look like uw_sm90a_gemm_recon_palette_n2p4_v8_store, uw_sm90a_gemm_mma_b8_r4w8p2c1_esc_store or uw_sm90a_decode_full_l7"
)]
pub struct ParseNameError {
    name: String,
    why: String,
}

impl VariantSpec {
    /// The canonical name, also in const context.
    pub const fn name(&self) -> Name {
        let name = Name::new().str("uw_").str(self.arch.tag()).str("_").str(self.op.family()).str("_");
        match self.op {
            Op::Decode(spec) => name.str(spec.output.tag()).str("_l").num(spec.code_limit.get()),
            Op::GemmRecon(spec) => {
                let name = match spec.source {
                    WeightSource::Exponent => name.str("exponent_n"),
                    WeightSource::Palette { .. } => name.str("palette_n"),
                };
                let name = name.num(spec.n_tiles.get()).str("p").num(spec.stages.get());
                let name = match spec.source {
                    WeightSource::Exponent => name,
                    WeightSource::Palette { verbatim } => name.str("_v").num(verbatim.get()),
                };
                name.str("_").str(spec.epilogue.tag())
            }
            Op::Encode(spec) => name.str(spec.stage.tag()),
            Op::GemmMma(spec) => name
                .str("b")
                .num(spec.batch_tile.get())
                .str("_r")
                .num(spec.row_blocks.get())
                .str("w")
                .num(spec.warps.get())
                .str("p")
                .num(spec.stages.get())
                .str("c")
                .num(spec.cluster.get())
                .flag(spec.persistent, "_persistent")
                .flag(spec.escapes, "_esc")
                .flag(spec.pdl, "_pdl")
                .str("_")
                .str(spec.epilogue.tag())
                .flag(spec.dump, "_dump"),
            Op::GemmWgmma(spec) => {
                let name = name.str("b").num(spec.batch_tile.get());
                let name = name.str("_g").num(spec.warpgroups.get()).str("p").num(spec.stages.get());
                let name = match spec.cluster.get() {
                    1 => name,
                    cluster => name.str("c").num(cluster),
                };
                name.flag(spec.stream_k, "_streamk")
                    .flag(spec.escapes, "_esc")
                    .flag(spec.pdl, "_pdl")
                    .str("_")
                    .str(spec.epilogue.tag())
                    .flag(spec.dump, "_dump")
            }
            Op::Repack(spec) => name.str(spec.stage.tag()),
        }
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
    let (arch, rest) = cut(rest, "an architecture")?;
    let arch = Arch::from_tag(arch).ok_or_else(|| format!("unknown architecture {arch:?}"))?;
    let (family, rest) = cut(rest, "a family")?;
    match family {
        "decode" => {
            let (output, limit) = cut(rest, "an output")?;
            let output = DecodeOutput::from_tag(output).ok_or_else(|| format!("unknown decoder output {output:?}"))?;
            let limit = axis(CodeLimit::new(number(limit, "l")?))?;
            Ok(VariantSpec::decode(arch, output, limit))
        }
        "encode" => {
            let stage = EncodeStage::from_tag(rest).ok_or_else(|| format!("unknown encoder stage {rest:?}"))?;
            Ok(VariantSpec::encode(arch, stage))
        }
        "gemm" => {
            let (kind, rest) = cut(rest, "a kind of matmul")?;
            match kind {
                "recon" => gemm_recon(arch, rest),
                "mma" => gemm_mma(arch, rest),
                "wgmma" => gemm_wgmma(arch, rest),
                other => Err(format!("unknown family \"gemm_{other}\"")),
            }
        }
        "repack" => {
            let stage = RepackStage::from_tag(rest).ok_or_else(|| format!("unknown packing stage {rest:?}"))?;
            Ok(VariantSpec::repack(arch, stage))
        }
        other => Err(format!("unknown family {other:?}")),
    }
}

fn gemm_recon(arch: Arch, rest: &str) -> Result<VariantSpec, String> {
    let (source, rest) = cut(rest, "a source")?;
    let (ring, rest) = cut(rest, "an epilogue")?;
    let [n, stages] = numbers(ring, ["n", "p"])?;
    let (n, stages) = (axis(NTiles::new(n))?, axis(Stages::new(stages))?);
    let (source, epilogue) = match source {
        "exponent" => (WeightSource::Exponent, rest),
        "palette" => {
            let (rows, rest) = cut(rest, "an epilogue")?;
            let verbatim = axis(VerbatimRows::new(number(rows, "v")?))?;
            (WeightSource::Palette { verbatim }, rest)
        }
        other => return Err(format!("unknown weight source {other:?}")),
    };
    let epilogue = Epilogue::from_tag(epilogue).ok_or_else(|| format!("unknown epilogue {epilogue:?}"))?;
    Ok(VariantSpec::gemm_recon(arch, source, n, stages, epilogue))
}

fn gemm_mma(arch: Arch, rest: &str) -> Result<VariantSpec, String> {
    let (batch, rest) = cut(rest, "a block")?;
    let (block, rest) = cut(rest, "an epilogue")?;
    let [row_blocks, warps, stages, cluster] = numbers(block, ["r", "w", "p", "c"])?;
    let (persistent, rest) = flag(rest, "persistent_");
    let (escapes, rest) = flag(rest, "esc_");
    let (pdl, rest) = flag(rest, "pdl_");
    let (dump, epilogue) = ending(rest)?;
    Ok(VariantSpec::gemm_mma(
        arch,
        GemmMmaSpec {
            batch_tile: axis(SmallBatchTile::new(number(batch, "b")?))?,
            row_blocks: axis(RowBlocks::new(row_blocks))?,
            warps: axis(Warps::new(warps))?,
            stages: axis(SmallStages::new(stages))?,
            cluster: axis(ClusterSize::new(cluster))?,
            persistent,
            escapes,
            pdl,
            epilogue,
            dump,
        },
    ))
}

fn gemm_wgmma(arch: Arch, rest: &str) -> Result<VariantSpec, String> {
    let (batch, rest) = cut(rest, "a block")?;
    let (block, rest) = cut(rest, "an epilogue")?;
    // Without a cluster the name does not mention it.
    let (warpgroups, stages, cluster) = if block.contains('c') {
        let [warpgroups, stages, cluster] = numbers(block, ["g", "p", "c"])?;
        (warpgroups, stages, cluster)
    } else {
        let [warpgroups, stages] = numbers(block, ["g", "p"])?;
        (warpgroups, stages, 1)
    };
    let (stream_k, rest) = flag(rest, "streamk_");
    let (escapes, rest) = flag(rest, "esc_");
    let (pdl, rest) = flag(rest, "pdl_");
    let (dump, epilogue) = ending(rest)?;
    Ok(VariantSpec::gemm_wgmma(
        arch,
        GemmWgmmaSpec {
            batch_tile: axis(WideBatchTile::new(number(batch, "b")?))?,
            warpgroups: axis(Warpgroups::new(warpgroups))?,
            stages: axis(WideStages::new(stages))?,
            cluster: axis(ClusterSize::new(cluster))?,
            stream_k,
            escapes,
            pdl,
            epilogue,
            dump,
        },
    ))
}

/// A flag that stands in front of the rest of the name, and that rest.
fn flag<'a>(rest: &'a str, flag: &str) -> (bool, &'a str) {
    match rest.strip_prefix(flag) {
        Some(rest) => (true, rest),
        None => (false, rest),
    }
}

/// `<epilogue>[_dump]`.
fn ending(rest: &str) -> Result<(bool, Epilogue), String> {
    let (dump, epilogue) = match rest.strip_suffix("_dump") {
        Some(epilogue) => (true, epilogue),
        None => (false, rest),
    };
    Ok((dump, Epilogue::from_tag(epilogue).ok_or_else(|| format!("unknown epilogue {epilogue:?}"))?))
}

fn axis<T>(value: Result<T, AxisError>) -> Result<T, String> {
    value.map_err(|error| error.to_string())
}

/// Numbers behind one letter each: `r4w8p2c1`.
fn numbers<const N: usize>(text: &str, letters: [&str; N]) -> Result<[u32; N], String> {
    let mut rest = text;
    let mut values = [0; N];
    for (value, letter) in values.iter_mut().zip(letters) {
        let digits = rest.strip_prefix(letter).ok_or_else(|| format!("{text:?} lacks {letter}<number>"))?;
        let end = digits.find(|c: char| !c.is_ascii_digit()).unwrap_or(digits.len());
        *value = number(&digits[..end], "")?;
        rest = &digits[end..];
    }
    if rest.is_empty() { Ok(values) } else { Err(format!("{text:?} ends in {rest:?}")) }
}

/// The part before the next `_` and what follows it.
fn cut<'a>(text: &'a str, then: &str) -> Result<(&'a str, &'a str), String> {
    text.split_once('_').ok_or_else(|| format!("{text:?} must be followed by {then}"))
}

fn number(text: &str, prefix: &str) -> Result<u32, String> {
    let digits = text.strip_prefix(prefix).ok_or_else(|| format!("{text:?} does not begin with {prefix:?}"))?;
    digits.parse().map_err(|_| format!("{digits:?} is not a number"))
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
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_spec() -> impl Strategy<Value = VariantSpec> {
        let arch = || prop::sample::select(Arch::ALL);
        let source = prop_oneof![
            Just(WeightSource::Exponent),
            prop::sample::select(&VerbatimRows::ALL[..]).prop_map(|verbatim| WeightSource::Palette { verbatim }),
        ];
        prop_oneof![
            (arch(), prop::sample::select(DecodeOutput::ALL), 6..=15u32)
                .prop_map(|(arch, output, limit)| VariantSpec::decode(arch, output, CodeLimit::new(limit).unwrap())),
            (arch(), source, 1..=4u32, 2..=8u32, prop::sample::select(Epilogue::ALL)).prop_map(
                |(arch, source, n, stages, epilogue)| {
                    VariantSpec::gemm_recon(
                        arch,
                        source,
                        NTiles::new(n).unwrap(),
                        Stages::new(stages).unwrap(),
                        epilogue,
                    )
                }
            ),
            (arch(), prop::sample::select(EncodeStage::ALL)).prop_map(|(arch, stage)| VariantSpec::encode(arch, stage)),
            (arch(), prop::sample::select(RepackStage::ALL)).prop_map(|(arch, stage)| VariantSpec::repack(arch, stage)),
            (arch(), any_gemm_mma()).prop_map(|(arch, spec)| VariantSpec::gemm_mma(arch, spec)),
            (arch(), any_gemm_wgmma()).prop_map(|(arch, spec)| VariantSpec::gemm_wgmma(arch, spec)),
        ]
    }

    fn any_gemm_mma() -> impl Strategy<Value = GemmMmaSpec> {
        let block = (1..=8u32, 1..=32u32, 1..=16u32, prop::sample::select(&ClusterSize::ALL[..]));
        let tile = prop::sample::select(&SmallBatchTile::ALL[..]);
        let flags = any::<[bool; 4]>();
        (tile, block, flags, prop::sample::select(Epilogue::ALL)).prop_map(
            |(batch_tile, (row_blocks, warps, stages, cluster), [persistent, escapes, pdl, dump], epilogue)| {
                GemmMmaSpec {
                    batch_tile,
                    row_blocks: RowBlocks::new(row_blocks).unwrap(),
                    warps: Warps::new(warps).unwrap(),
                    stages: SmallStages::new(stages).unwrap(),
                    cluster,
                    persistent,
                    escapes,
                    pdl,
                    epilogue,
                    dump,
                }
            },
        )
    }

    fn any_gemm_wgmma() -> impl Strategy<Value = GemmWgmmaSpec> {
        let tile = prop::sample::select(&WideBatchTile::ALL[..]);
        let cluster = prop::sample::select(&ClusterSize::ALL[..]);
        let flags = any::<[bool; 4]>();
        (tile, 1..=3u32, 3..=16u32, cluster, flags, prop::sample::select(Epilogue::ALL)).prop_map(
            |(batch_tile, warpgroups, stages, cluster, [stream_k, escapes, pdl, dump], epilogue)| GemmWgmmaSpec {
                batch_tile,
                warpgroups: Warpgroups::new(warpgroups).unwrap(),
                stages: WideStages::new(stages).unwrap(),
                cluster,
                stream_k,
                escapes,
                pdl,
                epilogue,
                dump,
            },
        )
    }

    proptest! {
        #[test]
        fn names_parse_back(spec in any_spec()) {
            let name = spec.name();
            prop_assert_eq!(name.parse::<VariantSpec>().unwrap(), spec);
            prop_assert!(name.len() <= 65, "a name must not come near the end of its buffer: {}", name);
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
            "uw_sm90a_decode_full_l7",
            "uw_sm90a_decode_exponent_l12",
            "uw_sm90a_encode_decode_table",
            "uw_sm90a_gemm_mma_b8_r4w8p2c1_esc_pdl_store",
            "uw_sm90a_gemm_mma_b64_r8w32p16c8_persistent_esc_pdl_store_add_dump",
            "uw_sm90a_gemm_wgmma_b128_g2p6_streamk_esc_store",
            "uw_sm90a_gemm_wgmma_b128_g2p6c2_esc_store",
            "uw_sm90a_gemm_mma_b8_r4w8p2c1_esc_silu_mul",
            "uw_sm90a_repack_unpack",
        ] {
            assert_eq!(name.parse::<VariantSpec>().unwrap().to_string(), name);
        }
    }

    #[test]
    fn what_is_no_name_says_why() {
        for (name, why) in [
            ("matmul", "does not begin with uw_"),
            ("uw_sm80_encode_stats", "unknown architecture \"sm80\""),
            ("uw_sm90a_decode_full_l07", "canonical spelling is uw_sm90a_decode_full_l7"),
            ("uw_sm90a_decode_full_l5", "code_limit = 5"),
            ("uw_sm90a_gemm_recon_palette_n2p4_store", "must be followed by an epilogue"),
            ("uw_sm90a_gemm_recon_palette_n2p4_v3_store", "verbatim = 3"),
            ("uw_sm90a_gemm_recon_exponent_n9p4_store", "n = 9"),
            ("uw_sm90a_gemm_recon_exponent_n2p4_keep", "unknown epilogue \"keep\""),
            ("uw_sm90a_gemm_recon_bitmap_n2p4_store", "unknown weight source \"bitmap\""),
            ("uw_sm90a_gemm_recon_exponent_n99999999999p4_store", "is not a number"),
            ("uw_sm90a_attention_x", "unknown family"),
            ("uw_sm90a_repack_palette", "unknown packing stage \"palette\""),
            ("uw_sm90a_gemm_medium_b8_r4w8p2c1_store", "unknown family \"gemm_medium\""),
            ("uw_sm90a_gemm_mma_b12_r4w8p2c1_store", "batch_tile = 12"),
            ("uw_sm90a_gemm_mma_b8_r4w8p2_store", "lacks c<number>"),
            ("uw_sm90a_gemm_mma_b8_r4w8p2c1x_store", "ends in \"x\""),
            ("uw_sm90a_gemm_mma_b8_r4w08p2c1_store", "canonical spelling is uw_sm90a_gemm_mma_b8_r4w8p2c1_store"),
            ("uw_sm90a_gemm_mma_b8_r4w8p2c1_pdl_esc_store", "unknown epilogue \"esc_store\""),
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
