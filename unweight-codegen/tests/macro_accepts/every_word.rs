//! Compares every word and number of the attribute with the canonical name: the macro and the spec agree.
use unweight_codegen::Variant;
use unweight_codegen::unweight_variant;

macro_rules! declare {
    ($($name:literal: ($($attribute:tt)*)),+ $(,)?) => {$({
        #[unweight_variant($($attribute)*)]
        struct Declared;
        assert_eq!(Declared::SPEC.name().as_str(), $name);
    })+};
}

#[test]
fn every_word_is_that_of_the_spec() {
    declare! {
        "uw_sm90a_gemm_recon_palette_n2p4_v8_store": (n = 2, stages = 4),
        "uw_sm90a_gemm_recon_palette_n1p2_v0_store_add": (n = 1, stages = 2, verbatim = 0, epilogue = store_add),
        "uw_sm90a_gemm_recon_palette_n1p6s2_v8_store": (n = 1, stages = 6, splits = 2),
        "uw_sm90a_gemm_recon_palette_n2p2_v4_store": (source = palette, n = 2, stages = 2, verbatim = 4, epilogue = store),
        "uw_sm90a_gemm_recon_palette_n2p2_v16_store": (n = 2, stages = 2, verbatim = 16),
        "uw_sm90a_gemm_recon_palette_n2p2_v32_store": (n = 2, stages = 2, verbatim = 32),
        "uw_sm90a_gemm_recon_palette_n1p2_v64_store": (n = 1, stages = 2, verbatim = 64),
        "uw_sm90a_gemm_recon_exponent_n2p4_store_add":
            (op = gemm_recon, arch = sm90a, source = exponent, n = 2usize, stages = 4, epilogue = store_add),
        "uw_sm90a_gemm_recon_exponent_n1p3_store": (stages = 3, n = 1, source = exponent),
        "uw_sm90a_decode_huffman_full_l7": (op = decode_huffman, output = full),
        "uw_sm90a_decode_huffman_exponent_l12": (op = decode_huffman, output = exponent, code_limit = 12),
        "uw_sm90a_decode_huffman_palette_l6": (op = decode_huffman, output = palette, code_limit = 6),
        "uw_sm90a_encode_huffman_stats": (op = encode_huffman, stage = stats),
        "uw_sm90a_encode_huffman_table": (op = encode_huffman, stage = table),
        "uw_sm90a_encode_huffman_rows": (op = encode_huffman, stage = rows),
        "uw_sm90a_encode_huffman_scan": (op = encode_huffman, stage = scan),
        "uw_sm90a_encode_huffman_write": (op = encode_huffman, stage = write),
        "uw_sm90a_encode_huffman_palette": (op = encode_huffman, stage = palette),
        "uw_sm90a_gemm_join_palette_b8_r4w8p2c1_store":
            (op = gemm_join, source = palette, batch_tile = 8, row_blocks = 4, warps = 8, stages = 2),
        "uw_sm90a_gemm_join_exponent_b32_r1w8p2c2_store_add":
            (op = gemm_join, source = exponent, batch_tile = 32, row_blocks = 1, warps = 8, stages = 2, cluster = 2,
             epilogue = store_add),
        "uw_sm90a_gemm_mma_b8_r4w8p2c1_esc_store":
            (op = gemm_mma, batch_tile = 8, row_blocks = 4, warps = 8, stages = 2),
        "uw_sm90a_gemm_mma_b16_r1w8p3c2_persistent_pdl_store_add_dump":
            (op = gemm_mma, batch_tile = 16, row_blocks = 1, warps = 8, stages = 3, cluster = 2, persistent = true,
             escapes = false, pdl = true, epilogue = store_add, dump = true),
        "uw_sm90a_gemm_mma_b32_r8w4p2c4_esc_store":
            (op = gemm_mma, batch_tile = 32, row_blocks = 8, warps = 4, stages = 2, cluster = 4, persistent = false,
             escapes = true, pdl = false, epilogue = store, dump = false),
        "uw_sm90a_gemm_mma_b8_r4w8p2c1_async_esc_store":
            (op = gemm_mma, batch_tile = 8, row_blocks = 4, warps = 8, stages = 2, copy = async),
        "uw_sm89_decode_huffman_full_l7_async_w16": (op = decode_huffman, arch = sm89, output = full, copy = async, warps = 16),
        "uw_sm90a_gemm_mma_b64_r1w1p1c8_esc_store":
            (op = gemm_mma, batch_tile = 64, row_blocks = 1, warps = 1, stages = 1, cluster = 8),
        "uw_sm90a_gemm_wgmma_b128_g2p6_esc_store": (op = gemm_wgmma, batch_tile = 128, stages = 6),
        "uw_sm90a_gemm_wgmma_b64_g1p3_streamk_pdl_store_add":
            (op = gemm_wgmma, batch_tile = 64, warpgroups = 1, stages = 3, stream_k = true, escapes = false,
             pdl = true, epilogue = store_add, dump = false),
        "uw_sm90a_gemm_wgmma_b192_g3p3_esc_store_dump":
            (op = gemm_wgmma, batch_tile = 192, warpgroups = 3, stages = 3, dump = true),
        "uw_sm90a_gemm_wgmma_b128_g1p8c2_esc_store":
            (op = gemm_wgmma, batch_tile = 128, warpgroups = 1, stages = 8, cluster = 2),
        "uw_sm90a_gemm_wgmma_b32_g2p12_esc_store": (op = gemm_wgmma, batch_tile = 32, stages = 12),
        "uw_sm90a_gemm_wgmma_b256_g2p4_esc_store": (op = gemm_wgmma, batch_tile = 256, stages = 4),
        "uw_sm90a_gemm_mma_b8_r2w8p3c1_esc_silu_mul":
            (op = gemm_mma, batch_tile = 8, row_blocks = 2, warps = 8, stages = 3, epilogue = silu_mul),
        "uw_sm90a_gemm_mma_b8_r3w8p2c1_esc_silu_mul":
            (op = gemm_mma, batch_tile = 8, row_blocks = 3, warps = 8, stages = 2, epilogue = silu_mul),
        "uw_sm90a_gemm_wgmma_b128_g2p6_streamk_esc_silu_mul":
            (op = gemm_wgmma, batch_tile = 128, stages = 6, stream_k = true, epilogue = silu_mul),
        "uw_sm90a_pack_tiles": (op = pack, stage = tiles),
        "uw_sm90a_pack_lists": (op = pack, stage = lists),
        "uw_sm90a_update_places": (op = update, stage = places),
        "uw_sm90a_update_count": (op = update, stage = count),
        "uw_sm90a_update_tiles": (op = update, stage = tiles),
        "uw_sm90a_update_lists": (op = update, stage = lists),
        "uw_sm90a_unpack": (op = unpack),
        "uw_sm90a_embed_bf16": (op = embed, source = bf16),
        "uw_sm90a_embed_packed_pdl": (op = embed, source = packed, pdl = true),
        "uw_sm90a_norm_t256": (op = norm),
        "uw_sm90a_norm_t512_pdl": (op = norm, threads = 512, pdl = true),
        "uw_sm90a_sample_t1024_c8": (op = sample),
        "uw_sm90a_sample_t1024_c2_pdl": (op = sample, cluster = 2, pdl = true),
        "uw_sm90a_sample_t1024_c8_adjusted": (op = sample, adjusted = true),
        "uw_sm90a_logprobs_t1024_pdl": (op = logprobs, pdl = true),
        "uw_sm90a_rope_d128_pdl": (op = rope, head_dim = 128, pdl = true),
        "uw_sm90a_silu_mul_t128": (op = silu_mul),
        "uw_sm90a_silu_mul_t256_pdl": (op = silu_mul, threads = 256, pdl = true),
    }
}
