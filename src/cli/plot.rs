//! Plots, as text for terminals and, with feature `plots`, as SVG.

#[cfg(feature = "plots")]
mod svg;

use std::{
    collections::BTreeMap,
    fs::File,
    io::{Read, Write},
    ops::Range,
    path::Path,
};

use unweight::format::{EncodingId, Histogram, Role, bundle::TensorReport};

use super::{
    failure::{Failure, Result},
    output, scratch,
};
#[cfg(feature = "plots")]
use svg::render;

/// The range from the first to the last exponent with this share of the elements is drawn; the notes next to the plot
/// count the others.
const COMMON: f64 = 1e-3;
/// Roles with a smaller share of the bytes are drawn together with other tensors.
const SMALL_ROLE: f64 = 0.01;
/// Tensors with a smaller share of the bytes are drawn together.
const SMALL_TENSOR: f64 = 0.002;
/// Length of the longest bar on a terminal, characters.
const COLUMNS: f64 = 56.0;

/// The content of an SVG file.
pub enum Drawing<'a> {
    /// The number of weights per exponent.
    Exponents(&'a Histogram),
    /// Stored size of each tensor as a share of its original size, by role; the width of a bar is the original size.
    Tensors(&'a [TensorReport]),
    /// Ratios over a value that doubles, such as the batch size, with one line each.
    Ratios(Ratios),
}

/// Lines of ratios to a baseline.
pub struct Ratios {
    /// The caption above the chart.
    pub caption: &'static str,
    /// The name of the x axis.
    pub x_name: &'static str,
    /// The name of the y axis.
    pub ratio_name: &'static str,
    /// The name and points of each line.
    pub lines: Vec<(String, BTreeMap<u32, f64>)>,
}

/// Writes a plot. Replaces an existing file only if it is an SVG, so that a typing error does not overwrite a shard.
pub fn save(path: &Path, drawing: &Drawing<'_>) -> Result<()> {
    let svg = render(drawing)?;
    let mut file = partial(path)?;
    file.write_all(svg.as_bytes()).map_err(Failure::io(path.display()))?;
    file.persist(path).map_err(|error| Failure::io(path.display())(error.error))?;
    Ok(())
}

/// Checks that [`save`] can write to `path`, before a measurement takes minutes.
pub fn check_can_save(path: Option<&Path>) -> Result<()> {
    let Some(path) = path else { return Ok(()) };
    if !cfg!(feature = "plots") {
        return Err(super::absent::option("--svg", "plots"));
    }
    partial(path).map(drop)
}

/// Creates a temporary file that can replace `path`, which must not exist or be an SVG.
fn partial(path: &Path) -> Result<tempfile::NamedTempFile> {
    if let Ok(metadata) = path.symlink_metadata() {
        let mut start = Vec::new();
        if metadata.is_file() {
            let read = File::open(path).and_then(|file| file.take(5).read_to_end(&mut start));
            read.map_err(Failure::io(path.display()))?;
        }
        // Compared at the first byte, because a safetensors header could contain the same text.
        if !start.starts_with(b"<svg") && !start.starts_with(b"<?xml") {
            let message = format!("{}: exists and is not a plot", path.display());
            return Err(Failure::new(
                "output-not-replaceable",
                message,
                "choose another name for --svg, or remove the file",
            ));
        }
    }
    scratch::unfinished_or_failure(path)
}

#[cfg(not(feature = "plots"))]
fn render(_: &Drawing<'_>) -> Result<String> {
    Err(super::absent::option("--svg", "plots"))
}

/// The plotted part of a histogram of exponents.
struct Exponents {
    /// The range from the first to the last common exponent.
    drawn: std::ops::RangeInclusive<u8>,
    /// Shares of the elements, percent.
    shares: Vec<f64>,
    /// Notes next to the plot.
    notes: Vec<String>,
}

impl Exponents {
    fn of(histogram: &Histogram) -> Result<Self> {
        let total = histogram.total();
        let common =
            |&exponent: &u8| histogram.count(exponent) > 0 && histogram.count(exponent) as f64 >= COMMON * total as f64;
        let common: Vec<u8> = (0..=255).filter(common).collect();
        let (Some(&first), Some(&last)) = (common.first(), common.last()) else {
            return Err(Failure::new(
                "nothing-to-draw",
                "no BF16 elements to draw",
                "choose other tensors with --tensor",
            ));
        };
        let share = |count: u64| count as f64 * 100.0 / total as f64;
        let outside = |range: Range<u16>| range.map(|exponent| histogram.count(exponent as u8)).sum::<u64>();
        let rare = [("below", first, outside(0..u16::from(first))), ("above", last, outside(u16::from(last) + 1..256))];
        let mut notes = vec![
            format!("{:.3} bits of information", histogram.entropy_bits()),
            "in the 8 of an exponent,".to_owned(),
            format!("{total} elements"),
        ];
        for (side, edge, count) in rare.into_iter().filter(|(.., count)| *count > 0) {
            let share = share(count);
            let share = if share < 0.01 { format!("{share:.1e}") } else { format!("{share:.2}") };
            notes.push(format!("{side} {edge}: {share} %"));
        }
        let shares = (first..=last).map(|exponent| share(histogram.count(exponent))).collect();
        Ok(Self { drawn: first..=last, shares, notes })
    }

    fn bars(&self) -> impl Iterator<Item = (u8, f64)> + '_ {
        self.drawn.clone().zip(self.shares.iter().copied())
    }

    fn highest(&self) -> f64 {
        self.shares.iter().copied().fold(0.0, f64::max)
    }
}

/// Writes [`Drawing::Exponents`] for a terminal.
pub fn exponents_text(histogram: &Histogram, out: &mut dyn Write) -> Result<()> {
    let exponents = Exponents::of(histogram)?;
    for (exponent, share) in exponents.bars() {
        writeln!(out, "{exponent:>3} {} {share:.2} %", blocks(share / exponents.highest()))?;
    }
    for line in &exponents.notes {
        writeln!(out, "{line}")?;
    }
    Ok(())
}

/// One or several tensors of the same encoding: a bar as wide as their original bytes.
#[cfg_attr(not(feature = "plots"), allow(dead_code, reason = "only SVG shows single tensors"))]
struct Stripe {
    from: u64,
    to: u64,
    stored_bytes: u64,
    encoding: EncodingId,
}

/// All tensors of a role, or of all small roles.
struct Group {
    label: &'static str,
    from: u64,
    to: u64,
    stored_bytes: u64,
}

/// Lays out all tensors by role, in the bundle's order. The small tensors of a role and encoding form one stripe at the
/// role's end.
fn arrange(tensors: &[TensorReport]) -> (Vec<Group>, Vec<Stripe>) {
    let total: u64 = tensors.iter().map(|tensor| tensor.original_bytes).sum();
    let of = |role: Role| tensors.iter().filter(move |tensor| tensor.role == role && tensor.original_bytes > 0);
    let is_small =
        |role: Role| (of(role).map(|tensor| tensor.original_bytes).sum::<u64>() as f64) < SMALL_ROLE * total as f64;
    let (mut groups, mut stripes, mut at) = (Vec::new(), Vec::<Stripe>::new(), 0);
    let (large, small): (Vec<Role>, Vec<Role>) =
        Role::ALL.iter().partition(|&&role| role != Role::Other && !is_small(role));
    let single = large.into_iter().map(|role| (role.name(), vec![role]));
    for (label, roles) in single.chain([("other", small)]) {
        let from = at;
        let mut merged: BTreeMap<EncodingId, (u64, u64)> = BTreeMap::new();
        for tensor in roles.iter().copied().flat_map(of) {
            let TensorReport { original_bytes, stored_bytes, encoding, .. } = *tensor;
            if (original_bytes as f64) < SMALL_TENSOR * total as f64 {
                let sums = merged.entry(encoding).or_default();
                *sums = (sums.0 + original_bytes, sums.1 + stored_bytes);
                continue;
            }
            stripes.push(Stripe { from: at, to: at + original_bytes, stored_bytes, encoding });
            at += original_bytes;
        }
        for (encoding, (original_bytes, stored_bytes)) in merged {
            stripes.push(Stripe { from: at, to: at + original_bytes, stored_bytes, encoding });
            at += original_bytes;
        }
        if at > from {
            let stored_bytes = roles.iter().copied().flat_map(of).map(|tensor| tensor.stored_bytes).sum();
            groups.push(Group { label, from, to: at, stored_bytes });
        }
    }
    (groups, stripes)
}

fn ratio_caption(tensors: &[TensorReport]) -> Result<(u64, String)> {
    let original: u64 = tensors.iter().map(|tensor| tensor.original_bytes).sum();
    let stored: u64 = tensors.iter().map(|tensor| tensor.stored_bytes).sum();
    if original == 0 {
        return Err(Failure::new("nothing-to-draw", "no tensors to draw", "choose other tensors with --tensor"));
    }
    let percent = stored as f64 * 100.0 / original as f64;
    Ok((original, format!("{} tensors: {percent:.1} % of {original} bytes", tensors.len())))
}

/// Writes [`Drawing::Tensors`] for a terminal, with a line per role.
pub fn ratio_text(tensors: &[TensorReport], out: &mut dyn Write) -> Result<()> {
    let (_, caption) = ratio_caption(tensors)?;
    for group in arrange(tensors).0 {
        let share = group.stored_bytes as f64 / (group.to - group.from) as f64;
        let bytes = output::bytes(group.to - group.from);
        writeln!(out, "{:<9} {} {:.1} % of {bytes}", group.label, blocks(share.min(1.0)), share * 100.0)?;
    }
    Ok(writeln!(out, "{caption}")?)
}

/// Returns a bar of at most [`COLUMNS`] characters, in eighths of a character.
fn blocks(share: f64) -> String {
    const PARTS: [&str; 8] = ["", "\u{258f}", "\u{258e}", "\u{258d}", "\u{258c}", "\u{258b}", "\u{258a}", "\u{2589}"];
    let eighths = (share * COLUMNS * 8.0).round() as usize;
    let bar = "\u{2588}".repeat(eighths / 8) + PARTS[eighths % 8];
    format!("{bar:<width$}", width = COLUMNS as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(role: Role, encoding: EncodingId, original_bytes: u64, stored_bytes: u64) -> TensorReport {
        TensorReport {
            file: "a".to_owned(),
            name: "b".to_owned(),
            role,
            layer: None,
            dtype: "BF16".to_owned(),
            shape: vec![original_bytes as usize / 2],
            encoding,
            reason: None,
            elements: original_bytes / 2,
            original_bytes,
            stored_bytes,
            bits_per_element: 0.0,
        }
    }

    #[test]
    fn plots_count_every_byte() {
        let mut tensors =
            vec![tensor(Role::Norm, EncodingId::RAW, 768, 768), tensor(Role::Other, EncodingId::RAW, 0, 0)];
        for _ in 0..4 {
            tensors.push(tensor(Role::Gate, EncodingId::HUFFMAN, 1_000_000, 680_000));
            tensors.push(tensor(Role::Q, EncodingId::HUFFMAN, 500_000, 340_000));
            tensors.extend((0..100).map(|_| tensor(Role::Gate, EncodingId::RAW, 10, 10)));
        }
        let (groups, stripes) = arrange(&tensors);
        let total: u64 = tensors.iter().map(|tensor| tensor.original_bytes).sum();
        assert_eq!(groups.iter().map(|group| group.label).collect::<Vec<_>>(), ["q", "gate", "other"]);
        // Four matrices per role, and one stripe for the small tensors of each role and encoding.
        assert_eq!(stripes.len(), 4 + 4 + 1 + 1);
        for pair in stripes.windows(2) {
            assert_eq!(pair[0].to, pair[1].from);
        }
        assert_eq!((stripes[0].from, stripes.last().unwrap().to), (0, total));
        assert_eq!((groups[0].from, groups.last().unwrap().to), (0, total));
        let stored: u64 = tensors.iter().map(|tensor| tensor.stored_bytes).sum();
        assert_eq!(stripes.iter().map(|stripe| stripe.stored_bytes).sum::<u64>(), stored);
        assert_eq!(groups.iter().map(|group| group.stored_bytes).sum::<u64>(), stored);
        let share = |group: &Group| group.stored_bytes as f64 / (group.to - group.from) as f64;
        assert!((share(&groups[0]) - 0.68).abs() < 1e-9 && (share(&groups[2]) - 1.0).abs() < 1e-9);
    }

    #[test]
    fn common_exponents_are_drawn_and_rare_ones_summed() {
        // Exponents 120 to 122 occur 2000 times each, 3 and 200 once.
        let bits: Vec<u16> = (0..6000).map(|i| (120 + i % 3) << 7).chain([3 << 7, 200 << 7]).collect();
        let bytes: Vec<u8> = bits.into_iter().flat_map(u16::to_le_bytes).collect();
        let exponents = Exponents::of(&Histogram::of(&bytes)).unwrap();
        assert_eq!(exponents.drawn, 120..=122);
        assert_eq!(exponents.notes[3..], ["below 120: 0.02 %", "above 122: 0.02 %"]);
        assert!(Exponents::of(&Histogram::of(&[])).is_err());
        let mut text = Vec::new();
        exponents_text(&Histogram::of(&bytes), &mut text).unwrap();
        assert_eq!(String::from_utf8(text).unwrap().lines().count(), 3 + 5);
    }

    #[test]
    fn bars_are_as_long_as_their_shares() {
        assert_eq!(blocks(0.0).trim(), "");
        assert_eq!(blocks(1.0).chars().filter(|&c| c == '\u{2588}').count(), 56);
        assert!(blocks(0.5 + 1.0 / 56.0 / 8.0).starts_with(&("\u{2588}".repeat(28) + "\u{258f}")));
        for share in [0.0, 0.3, 0.77, 1.0] {
            assert_eq!(blocks(share).chars().count(), 56);
        }
    }
}
