//! The `impl`, with the questions that only `unweight-codegen` can answer put as const assertions.

use crate::ast::{Op, PackedKeys, Source, Variant, Word};
use proc_macro2::TokenStream;
use quote::{quote, quote_spanned};
use syn::{LitInt, Path};

/// The item and its `impl Variant`.
pub(crate) fn expand(item: &TokenStream, variant: &Variant) -> TokenStream {
    let Variant { codegen, name, arch, op } = variant;
    let arch = enum_value(codegen, quote!(Arch), arch);
    let spec = match op {
        Op::GemmRecon { n, stages, source, epilogue } => {
            let source = match source {
                Source::Exponent => quote!(#codegen::spec::WeightSource::Exponent),
                Source::Palette { verbatim } => {
                    let verbatim = axis_value(codegen, quote!(VerbatimRows), verbatim);
                    quote!(#codegen::spec::WeightSource::Palette { verbatim: #verbatim })
                }
            };
            let n = axis_value(codegen, quote!(NTiles), n);
            let stages = axis_value(codegen, quote!(Stages), stages);
            let epilogue = enum_value(codegen, quote!(Epilogue), epilogue);
            quote!(#codegen::spec::VariantSpec::gemm_recon(#arch, #source, #n, #stages, #epilogue))
        }
        Op::Decode { output, code_limit } => {
            let output = enum_value(codegen, quote!(DecodeOutput), output);
            let code_limit = axis_value(codegen, quote!(CodeLimit), code_limit);
            quote!(#codegen::spec::VariantSpec::decode(#arch, #output, #code_limit))
        }
        Op::Encode { stage } => {
            let stage = enum_value(codegen, quote!(EncodeStage), stage);
            quote!(#codegen::spec::VariantSpec::encode(#arch, #stage))
        }
        Op::GemmMma { batch_tile, row_blocks, warps, cluster, persistent, packed } => {
            let batch_tile = axis_value(codegen, quote!(SmallBatchTile), batch_tile);
            let row_blocks = axis_value(codegen, quote!(RowBlocks), row_blocks);
            let warps = axis_value(codegen, quote!(Warps), warps);
            let cluster = axis_value(codegen, quote!(ClusterSize), cluster);
            let packed = packed_fields(codegen, quote!(SmallStages), packed);
            quote! {
                #codegen::spec::VariantSpec::gemm_mma(#arch, #codegen::spec::GemmMmaSpec {
                    batch_tile: #batch_tile,
                    row_blocks: #row_blocks,
                    warps: #warps,
                    cluster: #cluster,
                    persistent: #persistent,
                    #packed
                })
            }
        }
        Op::GemmWgmma { batch_tile, warpgroups, cluster, stream_k, packed } => {
            let batch_tile = axis_value(codegen, quote!(WideBatchTile), batch_tile);
            let warpgroups = axis_value(codegen, quote!(Warpgroups), warpgroups);
            let cluster = axis_value(codegen, quote!(ClusterSize), cluster);
            let packed = packed_fields(codegen, quote!(WideStages), packed);
            quote! {
                #codegen::spec::VariantSpec::gemm_wgmma(#arch, #codegen::spec::GemmWgmmaSpec {
                    batch_tile: #batch_tile,
                    warpgroups: #warpgroups,
                    cluster: #cluster,
                    stream_k: #stream_k,
                    #packed
                })
            }
        }
        Op::Repack { stage } => {
            let stage = enum_value(codegen, quote!(RepackStage), stage);
            quote!(#codegen::spec::VariantSpec::repack(#arch, #stage))
        }
    };
    quote! {
        #item

        #[automatically_derived]
        impl #codegen::Variant for #name {
            const SPEC: #codegen::spec::VariantSpec = {
                let spec = #spec;
                match #codegen::plan::Plan::new(&spec) {
                    ::core::result::Result::Ok(_) => spec,
                    ::core::result::Result::Err(error) => ::core::panic!("{}", error.message().as_str()),
                }
            };
        }

        // An associated constant that nobody reads is not evaluated; this one is.
        const _: #codegen::spec::VariantSpec = <#name as #codegen::Variant>::SPEC;
    }
}

fn packed_fields(codegen: &Path, stages_axis: TokenStream, packed: &PackedKeys) -> TokenStream {
    let PackedKeys { stages, escapes, pdl, dump, epilogue } = packed;
    let stages = axis_value(codegen, stages_axis, stages);
    let epilogue = enum_value(codegen, quote!(Epilogue), epilogue);
    quote!(stages: #stages, escapes: #escapes, pdl: #pdl, dump: #dump, epilogue: #epilogue)
}

/// A number as a value of its axis; a value that the axis does not have is an error at the number.
fn axis_value(codegen: &Path, axis: TokenStream, number: &LitInt) -> TokenStream {
    quote_spanned! {number.span()=>
        match #codegen::spec::#axis::new(#number) {
            ::core::result::Result::Ok(value) => value,
            ::core::result::Result::Err(error) => ::core::panic!("{}", error.message().as_str()),
        }
    }
}

fn enum_value(codegen: &Path, name: TokenStream, word: &Word) -> TokenStream {
    let value = &word.0;
    quote!(#codegen::spec::#name::#value)
}
