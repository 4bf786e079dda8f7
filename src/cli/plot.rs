//! Drawings, as SVG and for terminals. In SVG text stays text, so no font is needed here.

use std::{
    collections::BTreeMap,
    fs::{File, Permissions},
    io::{Read, Write},
    ops::Range,
    os::unix::fs::PermissionsExt,
    path::Path,
};

use plotters::{
    chart::ChartContext,
    coord::{Shift, types::RangedCoordf64},
    prelude::{
        BLACK, Cartesian2d, ChartBuilder, Circle, Color, DrawingArea, IntoDrawingArea, IntoTextStyle, PathElement,
        RGBColor, Rectangle, SVGBackend, Text, WHITE,
    },
    style::text_anchor::{HPos, Pos, VPos},
};
use unweight::format::{FormId, Histogram, bundle::TensorReport, form::FORMS, roles::Role};

use unweight_bench::{DecodeReport, Row};

use super::{
    failure::{Failure, Result},
    output, tune,
};

const SIZE: (u32, u32) = (960, 480);
const FONT: &str = "sans-serif";
/// Told apart by colour-blind readers, and in print.
/// One a form, in their order.
const FORM_COLOURS: [RGBColor; 8] = [
    RGBColor(0xbb, 0xbb, 0xbb),
    HUFFMAN,
    PALETTE,
    PACKED,
    RGBColor(0xcc, 0x79, 0xa7),
    RGBColor(0x56, 0xb4, 0xe9),
    RGBColor(0xd5, 0x5e, 0x00),
    RGBColor(0xf0, 0xe4, 0x42),
];
const HUFFMAN: RGBColor = RGBColor(0x00, 0x72, 0xb2);
const PALETTE: RGBColor = RGBColor(0xe6, 0x9f, 0x00);
const PACKED: RGBColor = RGBColor(0x00, 0x9e, 0x73);

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Chart<'b, 'a> = ChartContext<'b, SVGBackend<'a>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;

/// Right of a chart, for what would lie over the data otherwise.
const BESIDE: u32 = 176;
/// From the first to the last exponent with this share of the elements is drawn; the others are counted beside.
const COMMON: f64 = 1e-3;
/// A role with a smaller share of the bytes is drawn with the others.
const SMALL_ROLE: f64 = 0.01;
/// Tensors with a smaller share of the bytes are drawn together.
const SMALL_TENSOR: f64 = 0.002;
/// Characters of the longest bar on a terminal.
const COLUMNS: f64 = 56.0;

/// Writes a drawing. A file that is there is replaced if it is a drawing, too: a slip of the fingers must not cost a
/// shard.
pub fn save(path: &Path, svg: &str) -> Result<()> {
    let mut file = partial(path)?;
    file.write_all(svg.as_bytes()).map_err(Failure::io(path.display()))?;
    file.persist(path).map_err(|error| Failure::io(path.display())(error.error))?;
    Ok(())
}

/// Whether [`save`] could write there, as things are now: to be asked before minutes of measuring.
pub fn may_save(path: Option<&Path>) -> Result<()> {
    path.map_or(Ok(()), |path| partial(path).map(drop))
}

/// A file beside `path` that can take its name: what stands there is nothing or a drawing.
fn partial(path: &Path) -> Result<tempfile::NamedTempFile> {
    if let Ok(metadata) = path.symlink_metadata() {
        let mut start = Vec::new();
        if metadata.is_file() {
            let read = File::open(path).and_then(|file| file.take(5).read_to_end(&mut start));
            read.map_err(Failure::io(path.display()))?;
        }
        // From its first byte: elsewhere, a name in somebody's header would do.
        if !start.starts_with(b"<svg") && !start.starts_with(b"<?xml") {
            let message = format!("{}: exists, and is no drawing", path.display());
            return Err(Failure::new(
                "output-not-replaceable",
                message,
                "choose another name for --svg, or remove the file",
            ));
        }
    }
    beside(path)
}

/// A file in the folder of `path` that can take its name.
pub fn beside(path: &Path) -> Result<tempfile::NamedTempFile> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut builder = tempfile::Builder::new();
    // As any file that a program makes: what the user's mask allows.
    builder.prefix(".unweight-").permissions(Permissions::from_mode(0o666));
    builder.tempfile_in(folder).map_err(Failure::io(folder.display()))
}

/// What is drawn of a histogram of exponents.
struct Exponents {
    /// From the first common exponent to the last.
    drawn: std::ops::RangeInclusive<u8>,
    /// Shares of the elements, percent.
    shares: Vec<f64>,
    /// What there is to say beside.
    beside: Vec<String>,
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
        let mut beside = vec![
            format!("{:.3} bits of information", histogram.entropy_bits()),
            "in the 8 of an exponent,".to_owned(),
            format!("{total} elements"),
        ];
        for (side, edge, count) in rare.into_iter().filter(|(.., count)| *count > 0) {
            let share = share(count);
            let share = if share < 0.01 { format!("{share:.1e}") } else { format!("{share:.2}") };
            beside.push(format!("{side} {edge}: {share} %"));
        }
        let shares = (first..=last).map(|exponent| share(histogram.count(exponent))).collect();
        Ok(Self { drawn: first..=last, shares, beside })
    }

    fn bars(&self) -> impl Iterator<Item = (u8, f64)> + '_ {
        self.drawn.clone().zip(self.shares.iter().copied())
    }

    fn highest(&self) -> f64 {
        self.shares.iter().copied().fold(0.0, f64::max)
    }
}

/// How often each exponent occurs.
pub fn exponents(histogram: &Histogram) -> Result<String> {
    let exponents = Exponents::of(histogram)?;
    draw(|area| {
        let x = f64::from(*exponents.drawn.start()) - 0.5..f64::from(*exponents.drawn.end()) + 0.5;
        let (chart, beside) = area.split_horizontally(SIZE.0 - BESIDE);
        let x_axis = ("exponent (biased by 127)", &whole as &dyn Fn(&f64) -> String);
        let y_axis = ("share of elements, %", &whole as &dyn Fn(&f64) -> String);
        let mut chart = frame(&chart, "BF16 exponents".to_owned(), x, x_axis, exponents.highest() * 1.05, y_axis)?;
        let bars = exponents.bars().map(|(exponent, share)| {
            let middle = f64::from(exponent);
            Rectangle::new([(middle - 0.4, 0.0), (middle + 0.4, share)], HUFFMAN.filled())
        });
        chart.draw_series(bars).map_err(text)?;
        for (line, y) in exponents.beside.iter().zip((48..).step_by(18)) {
            write_at(&beside, line, (0, y))?;
        }
        Ok(())
    })
}

/// [`exponents`] for a terminal.
pub fn exponents_text(histogram: &Histogram, out: &mut dyn Write) -> Result<()> {
    let exponents = Exponents::of(histogram)?;
    for (exponent, share) in exponents.bars() {
        writeln!(out, "{exponent:>3} {} {share:.2} %", blocks(share / exponents.highest()))?;
    }
    for line in &exponents.beside {
        writeln!(out, "{line}")?;
    }
    Ok(())
}

/// Tensors side by side: their places in the drawing are as wide as their bytes.
struct Stripe {
    from: u64,
    to: u64,
    stored_bytes: u64,
    form: FormId,
}

/// Tensors of a role.
struct Group {
    label: &'static str,
    from: u64,
    to: u64,
    stored_bytes: u64,
}

/// Places of all tensors: by role, in the bundle's order, small ones of a role and a form together at the end of it.
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
        let mut together: BTreeMap<FormId, (u64, u64)> = BTreeMap::new();
        for tensor in roles.iter().copied().flat_map(of) {
            let TensorReport { original_bytes, stored_bytes, form, .. } = *tensor;
            if (original_bytes as f64) < SMALL_TENSOR * total as f64 {
                let sums = together.entry(form).or_default();
                *sums = (sums.0 + original_bytes, sums.1 + stored_bytes);
                continue;
            }
            stripes.push(Stripe { from: at, to: at + original_bytes, stored_bytes, form });
            at += original_bytes;
        }
        for (form, (original_bytes, stored_bytes)) in together {
            stripes.push(Stripe { from: at, to: at + original_bytes, stored_bytes, form });
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

/// Stored size of each tensor as a share of its original size; as wide as it is large, by role.
pub fn ratio(tensors: &[TensorReport]) -> Result<String> {
    let (original, caption) = ratio_caption(tensors)?;
    let (groups, stripes) = arrange(tensors);
    let (divisor, unit) = unit(original);
    let at = |bytes: u64| bytes as f64 / divisor;
    draw(|area| {
        let (chart, beside) = area.split_horizontally(SIZE.0 - BESIDE);
        let x_name = format!("original bytes, {unit}, by role");
        let x_axis = (x_name.as_str(), &short as &dyn Fn(&f64) -> String);
        let y_axis = ("stored, % of the original", &whole as &dyn Fn(&f64) -> String);
        let mut chart = frame(&chart, caption, 0.0..at(original), x_axis, 115.0, y_axis)?;
        let mut entries = Vec::new();
        for (form, &colour) in FORMS.iter().map(|form| form.id()).zip(FORM_COLOURS.iter().cycle()) {
            let mut own = stripes.iter().filter(|stripe| stripe.form == form).peekable();
            if own.peek().is_none() {
                continue;
            }
            let bars = own.map(|stripe| {
                let share = stripe.stored_bytes as f64 * 100.0 / (stripe.to - stripe.from) as f64;
                Rectangle::new([(at(stripe.from), 0.0), (at(stripe.to), share)], colour.filled())
            });
            chart.draw_series(bars).map_err(text)?;
            entries.push((form.name().to_owned(), colour));
        }
        for group in &groups {
            let edge = [(at(group.from), 0.0), (at(group.from), 115.0)];
            chart.draw_series([PathElement::new(edge, BLACK.mix(0.3).stroke_width(1))]).map_err(text)?;
            // A name wider than its place would lie over the next one.
            if (group.to - group.from) as f64 * 96.0 < original as f64 * group.label.len() as f64 {
                continue;
            }
            let style = (FONT, 13).into_text_style(area).pos(Pos::new(HPos::Center, VPos::Center));
            let middle = (at(group.from) + at(group.to)) / 2.0;
            chart.draw_series([Text::new(group.label, (middle, 108.0), style)]).map_err(text)?;
        }
        legend(&beside, &entries)
    })
}

/// [`ratio`] for a terminal: a line per role.
pub fn ratio_text(tensors: &[TensorReport], out: &mut dyn Write) -> Result<()> {
    let (_, caption) = ratio_caption(tensors)?;
    for group in arrange(tensors).0 {
        let share = group.stored_bytes as f64 / (group.to - group.from) as f64;
        let bytes = output::bytes(group.to - group.from);
        writeln!(out, "{:<9} {} {:.1} % of {bytes}", group.label, blocks(share.min(1.0)), share * 100.0)?;
    }
    Ok(writeln!(out, "{caption}")?)
}

/// A bar of at most [`COLUMNS`] characters, to the eighth of one.
fn blocks(share: f64) -> String {
    const PARTS: [&str; 8] = ["", "\u{258f}", "\u{258e}", "\u{258d}", "\u{258c}", "\u{258b}", "\u{258a}", "\u{2589}"];
    let eighths = (share * COLUMNS * 8.0).round() as usize;
    let bar = "\u{2588}".repeat(eighths / 8) + PARTS[eighths % 8];
    format!("{bar:<width$}", width = COLUMNS as usize)
}

/// A unit in which this many bytes are a number of few digits.
fn unit(bytes: u64) -> (f64, &'static str) {
    match bytes {
        0..0x10_0000 => (1024.0, "KiB"),
        0x10_0000..0x4000_0000 => (1048576.0, "MiB"),
        _ => (1073741824.0, "GiB"),
    }
}

/// Times cuBLAS over the batch, a line per shape: what dispatch takes, under dependent launch where that was measured.
pub fn speedups(rows: &[Row]) -> Result<String> {
    let caption = "Matmul from compressed weights: times cuBLAS, in the same rounds";
    ratios(caption, ("batch", "times cuBLAS"), &dispatched(rows))
}

/// By shape and form, by batch.
fn dispatched(rows: &[Row]) -> Vec<(String, BTreeMap<u32, f64>)> {
    // Per shape and batch the last of what dispatch takes: ordinary launches come before dependent ones.
    let mut lines: Vec<(String, BTreeMap<u32, f64>)> = Vec::new();
    for row in rows.iter().filter(|row| row.dispatched) {
        let Some(speedup) = row.speedup_over_cublas else { continue };
        let form = if row.contender.contains("gemm_compact") { ", compact" } else { "" };
        let name = if row.n == 0 { "a whole layer".to_owned() } else { format!("{} x {}{form}", row.n, row.k) };
        match lines.iter_mut().find(|line| line.0 == name) {
            Some((_, line)) => drop(line.insert(row.m, speedup)),
            None => lines.push((name, BTreeMap::from([(row.m, speedup)]))),
        }
    }
    lines
}

/// Steps of the twin over ours, by batch.
pub fn decode_steps(report: &DecodeReport) -> Result<String> {
    let steps = report.rows.iter().filter(|row| row.linears == "packed");
    let line = steps.filter_map(|row| Some((row.batch, row.over_twin?))).collect();
    let name = format!("context {}", report.options.context);
    let caption = "A decode step: times the same engine on cuBLAS, in the same rounds";
    ratios(caption, ("batch", "times the twin"), &[(name, line)])
}

/// Steps where a search began over those that it found, by batch.
pub fn tuned(rows: &[tune::Row]) -> Result<String> {
    let line = rows.iter().map(|row| (row.batch, row.start_us / row.step_us)).collect();
    ratios("A decode step: times the best guess of paths", ("batch", "times the start"), &[("tuned".to_owned(), line)])
}

/// Bytes that sums of coded FP8 vectors work through a second over those of plain ones, by size: how far coding
/// amplifies the memory's rate.
pub fn amplification(rows: &[Row]) -> Result<String> {
    ratios("Sums of two FP8 vectors: times the rate of plain ones", ("MiB a vector", "times plain"), &amplified(rows))
}

fn amplified(rows: &[Row]) -> Vec<(String, BTreeMap<u32, f64>)> {
    const PLAIN: &str = "fp8 as it is";
    let sums = || rows.iter().filter(|row| row.family == "rivals_fp8");
    let mut lines: Vec<(String, BTreeMap<u32, f64>)> = Vec::new();
    for row in sums().filter(|row| row.contender != PLAIN) {
        let Some(plain) = sums().find(|plain| plain.contender == PLAIN && plain.n == row.n) else { continue };
        let (name, point) = (format!("{} bytes", row.contender), (row.n >> 20, plain.median_us / row.median_us));
        match lines.iter_mut().find(|line| line.0 == name) {
            Some((_, line)) => drop(line.insert(point.0, point.1)),
            None => lines.push((name, BTreeMap::from([point]))),
        }
    }
    lines
}

/// Ratios over the batch, or whatever `x_name` says, a line each.
fn ratios(caption: &str, (x_name, ratio_name): (&str, &str), lines: &[(String, BTreeMap<u32, f64>)]) -> Result<String> {
    const COLOURS: [RGBColor; 12] = [
        RGBColor(0x00, 0x72, 0xb2),
        RGBColor(0xe6, 0x9f, 0x00),
        RGBColor(0x00, 0x9e, 0x73),
        RGBColor(0xcc, 0x79, 0xa7),
        RGBColor(0x56, 0xb4, 0xe9),
        RGBColor(0xd5, 0x5e, 0x00),
        RGBColor(0x88, 0x88, 0x88),
        RGBColor(0x33, 0x22, 0x88),
        RGBColor(0x88, 0x22, 0x55),
        RGBColor(0x99, 0x99, 0x33),
        RGBColor(0x00, 0x00, 0x00),
        RGBColor(0x66, 0x33, 0x00),
    ];
    let points = || lines.iter().flat_map(|(_, line)| line.iter());
    let (Some(first), Some(last)) = (points().map(|(m, _)| *m).min(), points().map(|(m, _)| *m).max()) else {
        return Err(Failure::new("nothing-to-draw", "nothing to draw", "measure at least one batch beside cuBLAS"));
    };
    let highest = points().map(|(_, speedup)| *speedup).fold(1.0, f64::max);
    let at = |m: u32| f64::from(m).log2();
    draw(|area| {
        let caption = caption.to_owned();
        let x = at(first) - 0.2..at(last) + 0.2;
        let (chart, beside) = area.split_horizontally(SIZE.0 - BESIDE);
        let batch = |x: &f64| {
            if x.fract().abs() < 1e-9 && *x <= at(last) { format!("{:.0}", x.exp2()) } else { String::new() }
        };
        let ratio = |y: &f64| format!("{y:.1}");
        let mut chart = frame(&chart, caption, x, (x_name, &batch), highest * 1.05, (ratio_name, &ratio))?;
        let even = [(at(first), 1.0), (at(last), 1.0)];
        chart.draw_series([PathElement::new(even, BLACK.stroke_width(1))]).map_err(text)?;
        for ((_, line), colour) in lines.iter().zip(COLOURS.into_iter().cycle()) {
            let points: Vec<(f64, f64)> = line.iter().map(|(m, speedup)| (at(*m), *speedup)).collect();
            let dots = points.iter().map(|point| Circle::new(*point, 3, colour.filled()));
            chart.draw_series(dots).map_err(text)?;
            chart.draw_series([PathElement::new(points, colour.stroke_width(2))]).map_err(text)?;
        }
        let entries: Vec<_> = lines.iter().map(|(name, _)| name.clone()).zip(COLOURS.into_iter().cycle()).collect();
        legend(&beside, &entries)
    })
}

/// Names of the series, beside the chart.
fn legend(area: &Area<'_>, entries: &[(String, RGBColor)]) -> std::result::Result<(), String> {
    for ((name, colour), y) in entries.iter().zip((48..).step_by(20)) {
        area.draw(&Rectangle::new([(0, y), (14, y + 12)], colour.filled())).map_err(text)?;
        write_at(area, name, (20, y))?;
    }
    Ok(())
}

fn write_at(area: &Area<'_>, line: &str, at: (i32, i32)) -> std::result::Result<(), String> {
    area.draw(&Text::new(line, at, (FONT, 13).into_text_style(area))).map_err(text)
}

/// Caption, axes and grid; `y` begins at 0.
fn frame<'a, 'b>(
    area: &Area<'a>,
    caption: String,
    x: Range<f64>,
    (x_name, x_label): (&str, &dyn Fn(&f64) -> String),
    y_end: f64,
    (y_name, y_label): (&str, &dyn Fn(&f64) -> String),
) -> std::result::Result<Chart<'b, 'a>, String> {
    let mut chart = ChartBuilder::on(area)
        .caption(caption, (FONT, 18))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(56)
        .build_cartesian_2d(x, 0.0..y_end)
        .map_err(text)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .max_light_lines(1)
        .x_desc(x_name)
        .y_desc(y_name)
        .x_label_formatter(x_label)
        .y_label_formatter(y_label)
        .draw()
        .map_err(text)?;
    Ok(chart)
}

fn whole(value: &f64) -> String {
    format!("{value:.0}")
}

/// Without digits that say nothing.
fn short(value: &f64) -> String {
    let text = format!("{value:.2}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn draw(on: impl FnOnce(&Area<'_>) -> std::result::Result<(), String>) -> Result<String> {
    let mut svg = String::new();
    let drawn = {
        let area = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        area.fill(&WHITE).map_err(text).and_then(|()| on(&area)).and_then(|()| area.present().map_err(text))
    };
    match drawn {
        Ok(()) => Ok(svg),
        Err(why) => Err(Failure::new(
            "drawing-failed",
            format!("cannot draw: {why}"),
            "use --json or --csv and draw it elsewhere",
        )),
    }
}

/// The backend's errors borrow what is drawn on.
fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(role: Role, form: FormId, original_bytes: u64, stored_bytes: u64) -> TensorReport {
        TensorReport {
            file: "a".to_owned(),
            name: "b".to_owned(),
            role,
            layer: None,
            dtype: "BF16".to_owned(),
            shape: vec![original_bytes as usize / 2],
            form,
            reason: None,
            elements: original_bytes / 2,
            original_bytes,
            stored_bytes,
            bits_per_element: 0.0,
        }
    }

    fn sum(contender: &str, n: u32, median_us: f64) -> Row {
        Row {
            family: "rivals_fp8",
            contender: contender.to_owned(),
            m: 0,
            n,
            k: 1,
            copies: 1,
            median_us,
            p10_us: median_us,
            p90_us: median_us,
            bytes: 0,
            gb_per_s: 0.0,
            floor_us: 0.0,
            floor_fraction: 0.0,
            speedup_over_cublas: None,
            error_to_cublas: None,
            dispatched: false,
        }
    }

    #[test]
    fn coded_sums_are_drawn_next_to_plain_ones() {
        let rows = [
            sum("fp8 as it is", 1 << 25, 25.0),
            sum("tans 128", 1 << 25, 75.0),
            sum("fp8 as it is", 1 << 26, 50.0),
            sum("tans 128", 1 << 26, 100.0),
            sum("tans 512", 1 << 26, 125.0),
            sum("tans 512", 1 << 27, 1.0),
        ];
        let line = |name: &str, points: &[(u32, f64)]| (name.to_owned(), points.iter().copied().collect());
        let expected = [line("tans 128 bytes", &[(32, 1.0 / 3.0), (64, 0.5)]), line("tans 512 bytes", &[(64, 0.4)])];
        assert_eq!(amplified(&rows), expected);
        assert!(amplification(&[]).is_err());
    }

    #[test]
    fn plots_count_every_byte() {
        let mut tensors = vec![tensor(Role::Norm, FormId::RAW, 768, 768), tensor(Role::Other, FormId::RAW, 0, 0)];
        for _ in 0..4 {
            tensors.push(tensor(Role::Gate, FormId::HUFFMAN, 1_000_000, 680_000));
            tensors.push(tensor(Role::Q, FormId::HUFFMAN, 500_000, 340_000));
            tensors.extend((0..100).map(|_| tensor(Role::Gate, FormId::RAW, 10, 10)));
        }
        let (groups, stripes) = arrange(&tensors);
        let total: u64 = tensors.iter().map(|tensor| tensor.original_bytes).sum();
        assert_eq!(groups.iter().map(|group| group.label).collect::<Vec<_>>(), ["q", "gate", "other"]);
        // Four matrices and what is small of each role and form.
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
        // 2000 times each 120 to 122, once 3 and 200.
        let bits: Vec<u16> = (0..6000).map(|i| (120 + i % 3) << 7).chain([3 << 7, 200 << 7]).collect();
        let bytes: Vec<u8> = bits.into_iter().flat_map(u16::to_le_bytes).collect();
        let exponents = Exponents::of(&Histogram::of(&bytes)).unwrap();
        assert_eq!(exponents.drawn, 120..=122);
        assert_eq!(exponents.beside[3..], ["below 120: 0.02 %", "above 122: 0.02 %"]);
        assert!(Exponents::of(&Histogram::of(&[])).is_err());
        let mut text = Vec::new();
        exponents_text(&Histogram::of(&bytes), &mut text).unwrap();
        assert_eq!(String::from_utf8(text).unwrap().lines().count(), 3 + 5);
    }

    #[test]
    fn both_placements_of_a_shape_have_a_line() {
        let row = |contender: &str, m, speedup| Row {
            family: "gemm_packed",
            contender: contender.to_owned(),
            m,
            n: 4096,
            k: 64,
            copies: 1,
            median_us: 1.0,
            p10_us: 1.0,
            p90_us: 1.0,
            bytes: 1,
            gb_per_s: 1.0,
            floor_us: 1.0,
            floor_fraction: 1.0,
            speedup_over_cublas: Some(speedup),
            error_to_cublas: None,
            dispatched: contender != "cublas",
        };
        let (packed, compact) = ("uw_sm90a_gemm_mma_b8_r4w8p2c1_store", "uw_sm90a_gemm_compact_b8_w8p1c1_store");
        let rows = [
            row("cublas", 1, 1.0),
            row(packed, 1, 1.2),
            row(packed, 1, 1.4),
            row(compact, 1, 1.3),
            row(packed, 2, 1.5),
        ];
        let lines = dispatched(&rows);
        let line = |points: &[(u32, f64)]| points.iter().copied().collect::<BTreeMap<_, _>>();
        assert_eq!(
            lines,
            [
                ("4096 x 64".to_owned(), line(&[(1, 1.4), (2, 1.5)])),
                ("4096 x 64, compact".to_owned(), line(&[(1, 1.3)])),
            ]
        );
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
