//! `abi.rs` and `abi.cuh` state one layout: every field of every argument struct has the same name, place and size in both.
//!
//! The rendered sources assert `sizeof`; two fields of one size that changed places would pass there and be caught here.

use std::mem::offset_of;
use unweight_codegen::abi::{DecodeArgs, EncodeArgs, GemmPackedArgs, GemmReconArgs, RepackArgs};

/// (name, offset, bytes) of each field, in order.
type Layout = Vec<(String, usize, usize)>;

/// The struct `name` of `abi.cuh`, laid out as C++ does on a 64-bit system.
fn device(name: &str) -> (Layout, usize) {
    let text = unweight_templates::header("unweight/abi.cuh").expect("abi.cuh is embedded");
    let body = text.split_once(&format!("struct {name} {{\n")).expect("the struct is in abi.cuh").1;
    let body = body.split_once("\n};").expect("the struct ends").0;
    let (mut layout, mut end, mut align_all) = (Layout::new(), 0usize, 1);
    for line in body.lines() {
        let declaration = line.split_once(';').expect("one field per line").0.trim();
        let (kind, field) = declaration.rsplit_once(' ').expect("a type and a name");
        let (bytes, align) = match kind {
            pointer if pointer.ends_with('*') => (8, 8),
            "u64" => (8, 8),
            "u32" | "float" => (4, 4),
            "TensorMap" => (128, 64),
            other => panic!("{name}.{field}: type {other} is not known to this test"),
        };
        // `reserved[14]` is an array.
        let (field, count) = match field.split_once('[') {
            Some((field, count)) => (field, count.trim_end_matches(']').parse().expect("a number of elements")),
            None => (field, 1),
        };
        let bytes = bytes * count;
        let offset = end.next_multiple_of(align);
        layout.push((field.to_owned(), offset, bytes));
        end = offset + bytes;
        align_all = align_all.max(align);
    }
    (layout, end.next_multiple_of(align_all))
}

/// A field's size, from a function that returns a reference to it.
fn bytes_of<S, F>(_: fn(&S) -> &F) -> usize {
    size_of::<F>()
}

// The pattern without `..` makes the compiler check that the list is complete.
macro_rules! layouts {
    ($($args:ident { $($field:ident),+ $(,)? })+) => {
        [$({
            let _complete = |args: $args| { let $args { $($field: _),+ } = args; };
            let layout: Layout = vec![$((
                stringify!($field).to_owned(),
                offset_of!($args, $field),
                bytes_of(|args: &$args| &args.$field),
            )),+];
            (stringify!($args), layout, size_of::<$args>())
        }),+]
    };
}

#[test]
fn host_and_device_agree_on_every_field() {
    let host = layouts! {
        DecodeArgs {
            sign_mantissa, encoded_exp, row_lengths, tile_metadata, verbatim_exponents, palette, code_lengths, output,
            fault, encoded_words, verbatim_rows, n, k, tile_rows, tile_cols, reserved,
        }
        GemmReconArgs {
            x, sign_mantissa, exponents, tile_metadata, verbatim_exponents, palette, y, verbatim_rows, m, n, k,
            tile_cols, reserved,
        }
        GemmPackedArgs {
            x, y_map, packed, escape_heads, escapes, y, workspace, counters, scale, escape_words, m, n, k, tile_cols,
            reserved,
        }
        EncodeArgs {
            weights, sign_mantissa, histogram, palette, code_lengths, encode_table, decode_table, row_lengths,
            tile_metadata, encoded_exp, verbatim_exponents, palette_index, totals, scan_state, capacity_words,
            capacity_rows, code_limit, n, k, tile_rows, tile_cols,
        }
        RepackArgs {
            weights, packed, escape_heads, escapes, group_words, inexact, escape_words, base, n, k, tile_rows, tile_cols,
        }
    };
    let text = unweight_templates::header("unweight/abi.cuh").expect("abi.cuh is embedded");
    let listed: Vec<_> = host.iter().map(|(name, ..)| format!("struct {name} {{")).collect();
    let declared: Vec<_> =
        text.lines().filter(|line| line.starts_with("struct ") && line.ends_with("Args {")).collect();
    assert_eq!(listed, declared, "the list above is in the order of abi.cuh and complete");
    for (name, mut layout, bytes) in host {
        // `repr(C)`: the order of offsets is the order of declaration.
        layout.sort_by_key(|(_, offset, _)| *offset);
        assert_eq!((layout, bytes), device(name), "{name}");
    }
}
