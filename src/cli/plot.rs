//! Drawings as SVG: text stays text, so no font is needed here.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::Read,
    ops::Range,
    path::Path,
};

use plotters::{
    chart::ChartContext,
    coord::{Shift, types::RangedCoordf64},
    prelude::{
        BLACK, Cartesian2d, ChartBuilder, Circle, Color, DrawingArea, IntoDrawingArea, PathElement, RGBColor,
        Rectangle, SVGBackend, SeriesLabelPosition, WHITE,
    },
};
use unweight::format::{Histogram, bundle::TensorReport, form::FORMS};

use unweight_bench::Row;

use super::failure::{Failure, Result};

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

/// Exponents rarer than this would be bars without height on an axis that they make long: they are counted in the caption.
const RARE: f64 = 1e-5;

/// Writes a drawing. A file that is there is replaced if it is a drawing, too: a slip of the fingers must not cost a shard.
pub fn save(path: &Path, svg: &str) -> Result<()> {
    if path.symlink_metadata().is_ok() {
        let mut start = [0; 256];
        let is_file = path.metadata().is_ok_and(|metadata| metadata.is_file());
        let read = if is_file { File::open(path).and_then(|mut file| file.read(&mut start)) } else { Ok(0) };
        let read = read.map_err(Failure::io(path.display()))?;
        if !is_file || !start[..read].windows(4).any(|window| window == b"<svg") {
            let message = format!("{}: exists, and is no drawing", path.display());
            return Err(Failure::new(message, "choose another name for --svg, or remove the file"));
        }
    }
    fs::write(path, svg).map_err(Failure::io(path.display()))
}

/// How often each exponent occurs.
pub fn exponents(histogram: &Histogram) -> Result<String> {
    let total = histogram.total() as f64;
    let used: Vec<u32> = (0..256).filter(|&exponent| histogram.count(exponent as u8) as f64 > RARE * total).collect();
    let (Some(&first), Some(&last)) = (used.first(), used.last()) else {
        return Err(Failure::new("no BF16 elements to draw", "choose other tensors with --tensor"));
    };
    let shown: u64 = used.iter().map(|&exponent| histogram.count(exponent as u8)).sum();
    let share = |exponent: u32| histogram.count(exponent as u8) as f64 * 100.0 / total;
    let highest = used.iter().map(|&exponent| share(exponent)).fold(0.0, f64::max);
    let caption = format!(
        "BF16 exponents: {:.3} bits of information in 8 ({} elements; {} of rare exponents not drawn)",
        histogram.entropy_bits(),
        histogram.total(),
        histogram.total() - shown
    );
    draw(|area| {
        let x = f64::from(first) - 0.5..f64::from(last) + 0.5;
        let mut chart = frame(
            area,
            caption,
            x,
            ("exponent (biased by 127)", &whole),
            highest * 1.05,
            ("share of elements, %", &whole),
        )?;
        let bars = used.iter().map(|&exponent| {
            let middle = f64::from(exponent);
            Rectangle::new([(middle - 0.4, 0.0), (middle + 0.4, share(exponent))], HUFFMAN.filled())
        });
        chart.draw_series(bars).map_err(text)?;
        Ok(())
    })
}

/// Stored size of each tensor as a share of its original size, in the bundle's order.
pub fn ratio(tensors: &[TensorReport]) -> Result<String> {
    let original: u64 = tensors.iter().map(|tensor| tensor.original_bytes).sum();
    let stored: u64 = tensors.iter().map(|tensor| tensor.stored_bytes).sum();
    if original == 0 {
        return Err(Failure::new("no tensors to draw", "choose other tensors with --tensor"));
    }
    let caption =
        format!("{} tensors: {:.1} % of {original} bytes", tensors.len(), stored as f64 * 100.0 / original as f64);
    draw(|area| {
        let x = 0.0..tensors.len() as f64;
        let mut chart = frame(
            area,
            caption,
            x,
            ("tensor, in the order of the bundle", &whole),
            125.0,
            ("stored, % of the original", &whole),
        )?;
        for (form, &colour) in FORMS.iter().map(|form| form.id()).zip(FORM_COLOURS.iter().cycle()) {
            let own = || tensors.iter().enumerate().filter(|(_, tensor)| tensor.form == form);
            if own().next().is_none() {
                continue;
            }
            let bars = own().map(|(index, tensor)| {
                // A tensor without elements is drawn as what it is: all of nothing.
                let share = tensor.stored_bytes as f64 * 100.0 / tensor.original_bytes.max(1) as f64;
                Rectangle::new([(index as f64, 0.0), (index as f64 + 1.0, share)], colour.filled())
            });
            let series = chart.draw_series(bars).map_err(text)?;
            series
                .label(form.name())
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], colour.stroke_width(8)));
        }
        legend(&mut chart)
    })
}

/// Times cuBLAS over the batch, a line per shape: what dispatch takes, under dependent launch where that was measured.
pub fn speedups(rows: &[Row]) -> Result<String> {
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
    // Per shape and batch the last of what dispatch takes: ordinary launches come before dependent ones.
    let mut lines: Vec<(String, BTreeMap<u32, f64>)> = Vec::new();
    for row in rows.iter().filter(|row| row.dispatched) {
        let Some(speedup) = row.speedup_over_cublas else { continue };
        let name = if row.n == 0 { "a whole layer".to_owned() } else { format!("{} x {}", row.n, row.k) };
        match lines.iter_mut().find(|line| line.0 == name) {
            Some((_, line)) => drop(line.insert(row.m, speedup)),
            None => lines.push((name, BTreeMap::from([(row.m, speedup)]))),
        }
    }
    let points = || lines.iter().flat_map(|(_, line)| line.iter());
    let (Some(first), Some(last)) = (points().map(|(m, _)| *m).min(), points().map(|(m, _)| *m).max()) else {
        return Err(Failure::new("no matmuls to draw", "measure at least one shape and batch"));
    };
    let highest = points().map(|(_, speedup)| *speedup).fold(1.0, f64::max);
    let at = |m: u32| f64::from(m).log2();
    draw(|area| {
        let caption = "Matmul from packed weights: times cuBLAS, in the same rounds".to_owned();
        let x = at(first) - 0.2..at(last) + 3.0;
        let batch = |x: &f64| {
            if x.fract().abs() < 1e-9 && *x <= at(last) { format!("{:.0}", x.exp2()) } else { String::new() }
        };
        let ratio = |y: &f64| format!("{y:.1}");
        let mut chart = frame(area, caption, x, ("batch", &batch), highest * 1.05, ("times cuBLAS", &ratio))?;
        let even = [(at(first), 1.0), (at(last), 1.0)];
        chart.draw_series([PathElement::new(even, BLACK.stroke_width(1))]).map_err(text)?;
        for ((name, line), colour) in lines.iter().zip(COLOURS.into_iter().cycle()) {
            let points: Vec<(f64, f64)> = line.iter().map(|(m, speedup)| (at(*m), *speedup)).collect();
            let dots = points.iter().map(|point| Circle::new(*point, 3, colour.filled()));
            chart.draw_series(dots).map_err(text)?;
            chart
                .draw_series([PathElement::new(points.clone(), colour.stroke_width(2))])
                .map_err(text)?
                .label(name.clone())
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], colour.stroke_width(3)));
        }
        legend(&mut chart)
    })
}

/// Names of the series.
fn legend<'b, 'a: 'b>(chart: &mut Chart<'b, 'a>) -> std::result::Result<(), String> {
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE.filled())
        .border_style(BLACK)
        .label_font((FONT, 14))
        .draw()
        .map_err(text)
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

fn draw(on: impl FnOnce(&Area<'_>) -> std::result::Result<(), String>) -> Result<String> {
    let mut svg = String::new();
    let drawn = {
        let area = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        area.fill(&WHITE).map_err(text).and_then(|()| on(&area)).and_then(|()| area.present().map_err(text))
    };
    match drawn {
        Ok(()) => Ok(svg),
        Err(why) => Err(Failure::new(format!("cannot draw: {why}"), "use --json or --csv and draw it elsewhere")),
    }
}

/// The backend's errors borrow what is drawn on.
fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}
