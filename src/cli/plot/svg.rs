//! Plots as SVG. Text is written as text elements, so no font is needed.

use std::ops::Range;

use plotters::{
    chart::ChartContext,
    coord::{Shift, types::RangedCoordf64},
    prelude::{
        BLACK, Cartesian2d, ChartBuilder, Circle, Color, DrawingArea, IntoDrawingArea, IntoTextStyle, PathElement,
        RGBColor, Rectangle, SVGBackend, Text, WHITE,
    },
    style::text_anchor::{HPos, Pos, VPos},
};
use unweight::format::{ENCODINGS, Histogram, bundle::TensorReport};

use super::{
    super::failure::{Failure, Result},
    Drawing, Exponents, Ratios, arrange, ratio_caption,
};

const SIZE: (u32, u32) = (960, 480);
const FONT: &str = "sans-serif";
/// One colour per encoding, in the order of [`ENCODINGS`]. Colour-blind readers can distinguish them, also in print.
const ENCODING_COLOURS: [RGBColor; 8] = [
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

/// Width of the area right of a chart, for text that would cover the data.
const SIDE_WIDTH: u32 = 176;

/// Returns the text of an SVG file.
pub(super) fn render(drawing: &Drawing<'_>) -> Result<String> {
    match drawing {
        Drawing::Exponents(histogram) => exponents(histogram),
        Drawing::Tensors(tensors) => ratio(tensors),
        Drawing::Ratios(drawn) => ratios(drawn),
    }
}

/// Draws the number of weights per exponent.
fn exponents(histogram: &Histogram) -> Result<String> {
    let exponents = Exponents::of(histogram)?;
    draw(|area| {
        let x = f64::from(*exponents.drawn.start()) - 0.5..f64::from(*exponents.drawn.end()) + 0.5;
        let (chart, side_area) = area.split_horizontally(SIZE.0 - SIDE_WIDTH);
        let x_axis = ("exponent (biased by 127)", &without_decimals as &dyn Fn(&f64) -> String);
        let y_axis = ("share of elements, %", &without_decimals as &dyn Fn(&f64) -> String);
        let mut chart = frame(&chart, "BF16 exponents".to_owned(), x, x_axis, exponents.highest() * 1.05, y_axis)?;
        let bars = exponents.bars().map(|(exponent, share)| {
            let middle = f64::from(exponent);
            Rectangle::new([(middle - 0.4, 0.0), (middle + 0.4, share)], HUFFMAN.filled())
        });
        chart.draw_series(bars).map_err(text)?;
        for (line, y) in exponents.notes.iter().zip((48..).step_by(18)) {
            write_at(&side_area, line, (0, y))?;
        }
        Ok(())
    })
}

/// Draws the stored size of each tensor as a share of its original size, by role; the width of a bar is the original
/// size.
fn ratio(tensors: &[TensorReport]) -> Result<String> {
    let (original, caption) = ratio_caption(tensors)?;
    let (groups, stripes) = arrange(tensors);
    let (divisor, unit) = unit(original);
    let at = |bytes: u64| bytes as f64 / divisor;
    draw(|area| {
        let (chart, side_area) = area.split_horizontally(SIZE.0 - SIDE_WIDTH);
        let x_name = format!("original bytes, {unit}, by role");
        let x_axis = (x_name.as_str(), &short as &dyn Fn(&f64) -> String);
        let y_axis = ("stored, % of the original", &without_decimals as &dyn Fn(&f64) -> String);
        let mut chart = frame(&chart, caption, 0.0..at(original), x_axis, 115.0, y_axis)?;
        let mut entries = Vec::new();
        for (encoding, &colour) in ENCODINGS.iter().map(|encoding| encoding.id()).zip(ENCODING_COLOURS.iter().cycle()) {
            let mut stripes_of_encoding = stripes.iter().filter(|stripe| stripe.encoding == encoding).peekable();
            if stripes_of_encoding.peek().is_none() {
                continue;
            }
            let bars = stripes_of_encoding.map(|stripe| {
                let share = stripe.stored_bytes as f64 * 100.0 / (stripe.to - stripe.from) as f64;
                Rectangle::new([(at(stripe.from), 0.0), (at(stripe.to), share)], colour.filled())
            });
            chart.draw_series(bars).map_err(text)?;
            entries.push((encoding.name().to_owned(), colour));
        }
        for group in &groups {
            let edge = [(at(group.from), 0.0), (at(group.from), 115.0)];
            chart.draw_series([PathElement::new(edge, BLACK.mix(0.3).stroke_width(1))]).map_err(text)?;
            // A name wider than its group would overlap the next one.
            if (group.to - group.from) as f64 * 96.0 < original as f64 * group.label.len() as f64 {
                continue;
            }
            let style = (FONT, 13).into_text_style(area).pos(Pos::new(HPos::Center, VPos::Center));
            let middle = (at(group.from) + at(group.to)) / 2.0;
            chart.draw_series([Text::new(group.label, (middle, 108.0), style)]).map_err(text)?;
        }
        legend(&side_area, &entries)
    })
}

/// Returns a unit in which this number of bytes has few digits.
fn unit(bytes: u64) -> (f64, &'static str) {
    match bytes {
        0..0x10_0000 => (1024.0, "KiB"),
        0x10_0000..0x4000_0000 => (1048576.0, "MiB"),
        _ => (1073741824.0, "GiB"),
    }
}

/// Draws ratios over the batch size, or over what `x_name` names, with one line each.
fn ratios(Ratios { caption, x_name, ratio_name, lines }: &Ratios) -> Result<String> {
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
        return Err(Failure::new("nothing-to-draw", "nothing to draw", "measure at least one batch size with cuBLAS"));
    };
    let highest = points().map(|(_, speedup)| *speedup).fold(1.0, f64::max);
    let at = |m: u32| f64::from(m).log2();
    draw(|area| {
        let caption = (*caption).to_owned();
        let x = at(first) - 0.2..at(last) + 0.2;
        let (chart, side_area) = area.split_horizontally(SIZE.0 - SIDE_WIDTH);
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
        legend(&side_area, &entries)
    })
}

/// Draws the names of the series next to the chart.
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

/// Draws caption, axes and grid; `y` starts at 0.
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

fn without_decimals(value: &f64) -> String {
    format!("{value:.0}")
}

/// Formats a value without trailing zeros.
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

/// Converts the backend's errors, which borrow the drawing, to text.
fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_without_points_are_an_error() {
        let ratios = Ratios { caption: "", x_name: "", ratio_name: "", lines: Vec::new() };
        assert!(render(&Drawing::Ratios(ratios)).is_err());
    }
}
