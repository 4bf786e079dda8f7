//! The graph of encodings: nodes are encodings of a weight, edges are kernel families that convert one encoding to
//! another or to a product.
//!
//! ```text
//! huffman --decode--> bf16 <--host-- any encoding        exponents --gemm_recon--> product
//! compact --decode--> bf16
//!    |                 | ^                           palette   --gemm_recon--> product
//!    +--> exponents    v |  unpack                   packed    --gemm_packed-> product
//!    +--> palette     packed                         bf16      --cublas------> product
//! ```
//! Nodes and edges are two static lists, which all code that loads, warms or lists kernels walks. The graph does not
//! depend on a device.

use unweight_codegen::{
    VariantSpec,
    spec::{Arch, CodeLimit, DecodeCompactStage, DecodeElement, DecodeOutput, catalog},
};
use unweight_format::{EncodingId, Float};

/// An encoding of a weight, as far as kernels distinguish encodings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Node {
    /// BF16 on the device, in whole tiles if kernels read it.
    Bf16,
    /// Huffman-coded exponents.
    Huffman,
    /// Palette indices.
    Palette,
    /// Packed: 12 bits per weight.
    Packed,
    /// Entropy-coded classes of exponents.
    Compact,
    /// Exponents, one byte each.
    Exponents,
    /// An encoding that only the host decodes.
    Host,
    /// The result `X * W^T`.
    Product,
}

impl Node {
    /// Returns the node at which weights of an encoding enter the graph.
    pub fn of(encoding: EncodingId) -> Self {
        match encoding {
            EncodingId::RAW => Self::Bf16,
            EncodingId::HUFFMAN => Self::Huffman,
            EncodingId::PALETTE => Self::Palette,
            EncodingId::PACKED => Self::Packed,
            EncodingId::COMPACT => Self::Compact,
            _ => Self::Host,
        }
    }
}

/// The kernel or copy of an edge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Step {
    /// The host decodes the tensor on loading and pads it to whole tiles.
    Host,
    /// A decoder of Huffman-coded tensors.
    Decode(DecodeOutput),
    /// The decoder of compact tensors to BF16 on the GPU.
    DecodeCompact,
    /// Packing on the GPU.
    Pack,
    /// Unpacking on the GPU.
    Unpack,
    /// The report's reconstructive matmul.
    GemmRecon,
    /// The packed matmuls.
    GemmPacked,
    /// cuBLAS, without a kernel of this project.
    Cublas,
}

/// An edge of the graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Edge {
    /// The encoding before the step.
    pub from: Node,
    /// The encoding after the step.
    pub to: Node,
    /// The kernel or copy.
    pub step: Step,
}

const fn edge(from: Node, to: Node, step: Step) -> Edge {
    Edge { from, to, step }
}

/// All edges.
pub const EDGES: [Edge; 14] = [
    edge(Node::Huffman, Node::Bf16, Step::Decode(DecodeOutput::Full)),
    edge(Node::Huffman, Node::Exponents, Step::Decode(DecodeOutput::Exponent)),
    edge(Node::Huffman, Node::Palette, Step::Decode(DecodeOutput::Palette)),
    edge(Node::Huffman, Node::Bf16, Step::Host),
    edge(Node::Compact, Node::Bf16, Step::DecodeCompact),
    edge(Node::Compact, Node::Bf16, Step::Host),
    edge(Node::Palette, Node::Bf16, Step::Host),
    edge(Node::Host, Node::Bf16, Step::Host),
    edge(Node::Bf16, Node::Packed, Step::Pack),
    edge(Node::Packed, Node::Bf16, Step::Unpack),
    edge(Node::Exponents, Node::Product, Step::GemmRecon),
    edge(Node::Palette, Node::Product, Step::GemmRecon),
    edge(Node::Packed, Node::Product, Step::GemmPacked),
    edge(Node::Bf16, Node::Product, Step::Cublas),
];

/// Returns all paths from a node to a product without repeated nodes, shortest first; ties in the order of [`EDGES`].
///
/// ```
/// use unweight_rt::raw::choose::graph::{Node, Step, paths};
/// let steps = |node| -> Vec<Vec<Step>> {
///     paths(node).iter().map(|path| path.iter().map(|edge| edge.step).collect()).collect()
/// };
/// assert_eq!(steps(Node::Packed), [vec![Step::GemmPacked], vec![Step::Unpack, Step::Cublas]]);
/// assert_eq!(steps(Node::Bf16), [vec![Step::Cublas], vec![Step::Pack, Step::GemmPacked]]);
/// ```
pub fn paths(from: Node) -> Vec<Vec<Edge>> {
    fn walk(node: Node, path: &mut Vec<Edge>, found: &mut Vec<Vec<Edge>>) {
        if node == Node::Product {
            found.push(path.clone());
            return;
        }
        for edge in EDGES.into_iter().filter(|edge| edge.from == node) {
            if path.iter().all(|before| before.from != edge.to) {
                path.push(edge);
                walk(edge.to, path, found);
                path.pop();
            }
        }
    }
    let mut found = Vec::new();
    walk(from, &mut Vec::new(), &mut found);
    // Stable: ties keep their order.
    found.sort_by_key(Vec::len);
    found
}

/// Returns the decoder for codes of up to `code_bits` bits with the smallest sufficient table. `None` above 15 bits.
pub fn decoder(arch: Arch, output: DecodeOutput, code_bits: u32) -> Option<VariantSpec> {
    let limit = CodeLimit::new(code_bits.max(CodeLimit::MIN.get())).ok()?;
    Some(VariantSpec::decode_huffman(arch, output, limit))
}

/// Returns the decoder of an exponents tensor with codes of up to `code_bits` bits: the built-in one with the smallest
/// sufficient table. `None` above 15 bits, and for BF16, which is decoded from a Huffman tensor.
pub fn element_decoder(arch: Arch, float: Float, code_bits: u32) -> Option<VariantSpec> {
    let limit = [CodeLimit::DEFAULT, CodeLimit::MAX].into_iter().find(|limit| code_bits <= limit.get())?;
    (float != Float::Bf16).then(|| VariantSpec::decode_elements(arch, DecodeElement::of(float), limit))
}

/// Returns the kernel of [`Step::DecodeCompact`].
pub fn decode_compact(arch: Arch) -> VariantSpec {
    VariantSpec::decode_compact(arch, DecodeCompactStage::Full)
}

/// Returns the kernels of [`Step::Pack`] and [`Step::Unpack`].
pub fn packing(arch: Arch) -> Vec<VariantSpec> {
    catalog::packing(arch).collect()
}

#[cfg(test)]
mod tests {
    use unweight_format::ENCODINGS;

    use super::*;

    #[test]
    fn short_codes_take_the_smallest_decoder() {
        let name = |output, bits| decoder(Arch::Sm90a, output, bits).map(|spec| spec.to_string());
        assert_eq!(name(DecodeOutput::Full, 1).unwrap(), "uw_sm90a_decode_huffman_full_l6");
        assert_eq!(name(DecodeOutput::Palette, 15).unwrap(), "uw_sm90a_decode_huffman_palette_l15");
        assert_eq!(name(DecodeOutput::Full, 16), None);
        let name = |float, bits| element_decoder(Arch::Sm90a, float, bits).map(|spec| spec.to_string());
        assert_eq!(name(Float::E4M3, 3).unwrap(), "uw_sm90a_decode_huffman_full_e4m3_l7");
        assert_eq!(name(Float::F32, 8).unwrap(), "uw_sm90a_decode_huffman_full_f32_l15");
        assert_eq!((name(Float::F16, 16), name(Float::Bf16, 7)), (None, None));
    }

    #[test]
    fn decoders_of_every_type_ship() {
        for arch in Arch::ALL {
            let shipped = catalog::all(*arch);
            for (float, bits) in Float::ALL.into_iter().flat_map(|float| (1..=15).map(move |bits| (float, bits))) {
                let spec = element_decoder(*arch, float, bits);
                assert_eq!(spec.is_some(), float != Float::Bf16);
                assert!(spec.is_none_or(|spec| shipped.contains(&spec)), "{spec:?}");
            }
        }
    }

    #[test]
    fn every_encoding_reaches_a_product() {
        let nodes =
            [Node::Bf16, Node::Huffman, Node::Palette, Node::Packed, Node::Compact, Node::Exponents, Node::Host];
        for node in nodes {
            let paths = paths(node);
            assert!(!paths.is_empty(), "{node:?}");
            for path in &paths {
                assert_eq!((path[0].from, path[path.len() - 1].to), (node, Node::Product));
                assert!(path.windows(2).all(|pair| pair[0].to == pair[1].from), "{path:?}");
            }
            // A weight that cannot be packed ends at cuBLAS; exponents alone are not a weight.
            let cublas = paths.iter().any(|path| path[path.len() - 1].step == Step::Cublas);
            assert_eq!(cublas, node != Node::Exponents, "{node:?}");
        }
        for encoding in ENCODINGS {
            assert!(!paths(Node::of(encoding.id())).is_empty(), "{}", encoding.id());
        }
    }
}
