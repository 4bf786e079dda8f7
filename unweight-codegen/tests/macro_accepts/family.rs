//! The attribute names the family of a variant as a type, using its keys alone.
use unweight_codegen::spec::{
    AttentionSpec, DecodeHuffmanSpec, GemmCompactSpec, GemmMmaSpec, GemmReconSpec, GemmWgmmaSpec, NormSpec, SampleSpec,
};
use unweight_codegen::{Variant, unweight_variant};

#[unweight_variant(op = gemm_mma, batch_tile = 8, row_blocks = 3, warps = 10, stages = 2)]
struct GateUp;

#[unweight_variant(stages = 4, n = 2)]
struct Default;

/// The family is also recognised if `op` follows other keys.
#[unweight_variant(batch_tile = 128, stages = 6, op = gemm_wgmma)]
pub struct Wide;

fn is<V: Variant<Family = F>, F>() {}

macro_rules! families {
    ($($family:ident: ($($attribute:tt)*)),+ $(,)?) => {$({
        #[unweight_variant($($attribute)*)]
        struct Declared;
        is::<Declared, $family>();
    })+};
}

#[test]
fn the_family_is_a_type() {
    is::<GateUp, GemmMmaSpec>();
    is::<Default, GemmReconSpec>();
    is::<Wide, GemmWgmmaSpec>();
    families! {
        AttentionSpec: (op = attention, step = decode, head_dim = 128, warps = 4, stages = 2),
        DecodeHuffmanSpec: (op = decode_huffman, output = full),
        GemmCompactSpec: (op = gemm_compact, batch_tile = 8, warps = 8, stages = 1),
        NormSpec: (op = norm),
        SampleSpec: (op = sample),
    }
}
