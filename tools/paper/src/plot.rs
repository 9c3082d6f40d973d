//! A panel's plot as SVG, by plotters.

use crate::panels::{Filled, Series, Shape};
use plotters::prelude::*;
use std::error::Error;

const SIZE: (u32, u32) = (760, 400);
/// Distinct for most eyes (Okabe and Ito), in the order of series.
const COLOURS: [RGBColor; 8] = [
    RGBColor(0, 114, 178),
    RGBColor(230, 159, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(213, 94, 0),
    RGBColor(86, 180, 233),
    RGBColor(120, 120, 120),
    RGBColor(0, 0, 0),
];
/// Above this ratio of the largest to the smallest value the axis is logarithmic.
const WIDE: f64 = 12.0;
/// More than anyone can tell apart.
const MAX_POINTS: usize = 4096;
/// No measurement is as large, or as small as its inverse; axes as long would take all time.
const FAR: f64 = 1e12;

/// The plot; None if the panel is a table, empty, or has more points or other numbers than measurements have.
pub(crate) fn svg(filled: &Filled) -> Option<String> {
    let Shape::Lines { x, y } = filled.panel.shape else { return None };
    let points = || filled.series.iter().flat_map(|series| &series.points);
    if !(1..=MAX_POINTS).contains(&points().count()) {
        return None;
    }
    let range = |values: &mut dyn Iterator<Item = f64>| {
        values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| (low.min(v), high.max(v)))
    };
    let (left, right) = range(&mut points().map(|point| point.x));
    let (low, _) = range(&mut points().map(|point| point.low));
    let (_, high) = range(&mut points().map(|point| point.high));
    // A point far outside the axes would be at a pixel that is none.
    if left < 0.0 || low < 0.0 || right > FAR || high > FAR {
        return None;
    }
    let pad = ((right - left) * 0.03).max(0.5);
    let across = left - pad..right + pad;
    let mut text = String::new();
    let drawn = if low > 1.0 / FAR && high / low > WIDE {
        draw(&mut text, filled, (x, y), across, (low * 0.8..high * 1.25).log_scale())
    } else {
        draw(&mut text, filled, (x, y), across, 0.0..(high * 1.08).max(1.0 / FAR))
    };
    // Drawing into a string fails only for ranges without numbers.
    drawn.ok().map(|()| text)
}

fn draw<Y>(
    text: &mut String,
    filled: &Filled,
    (x, y): (&str, &str),
    across: std::ops::Range<f64>,
    up: Y,
) -> Result<(), Box<dyn Error>>
where
    Y: plotters::coord::ranged1d::AsRangedCoord<Value = f64>,
    Y::CoordDescType: plotters::coord::ranged1d::ValueFormatter<f64>,
{
    let root = SVGBackend::with_string(text, SIZE).into_drawing_area();
    let whole = |e: &dyn Error| e.to_string();
    let mut chart = ChartBuilder::on(&root)
        .margin(12)
        .x_label_area_size(44)
        .y_label_area_size(64)
        .build_cartesian_2d(across, up)
        .map_err(|e| whole(&e))?;
    let mesh = chart
        .configure_mesh()
        .x_desc(x)
        .y_desc(y)
        .label_style(("sans-serif", 13))
        .light_line_style(TRANSPARENT)
        .y_label_formatter(&|value| short(*value))
        .x_label_formatter(&|value| short(*value))
        .draw();
    mesh.map_err(|e| whole(&e))?;
    for (index, series) in filled.series.iter().enumerate() {
        let colour = COLOURS[index % COLOURS.len()];
        let line = series.points.iter().map(|point| (point.x, point.y));
        let drawn = chart.draw_series(LineSeries::new(line, colour.stroke_width(2)));
        drawn
            .map_err(|e| whole(&e))?
            .label(&series.name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(3)));
        chart.draw_series(marks(series, colour)).map_err(|e| whole(&e))?;
    }
    let legend = chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.85))
        .border_style(RGBColor(200, 200, 200))
        .label_font(("sans-serif", 13))
        .draw();
    legend.map_err(|e| whole(&e))?;
    root.present().map_err(|e| whole(&e))?;
    Ok(())
}

/// Median with what lies between the smallest and the largest.
fn marks(
    series: &Series,
    colour: RGBColor,
) -> impl Iterator<Item = ErrorBar<f64, f64, plotters::element::ErrorBarOrientV<f64, f64>>> {
    series.points.iter().map(move |point| {
        ErrorBar::new_vertical(point.x, point.low, point.y, point.high, colour.filled(), 6)
    })
}

/// A number as short as it stays clear.
pub(crate) fn short(value: f64) -> String {
    let digits = match value.abs() {
        v if v >= 100.0 || v == 0.0 => 0,
        v if v >= 10.0 => 1,
        v if v >= 1.0 => 2,
        _ => 3,
    };
    let text = format!("{value:.digits$}");
    if text.contains('.') {
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    } else {
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::panels::{Panel, Point};

    #[test]
    fn what_no_measurement_gives_is_not_drawn() {
        let drawn = |ys: &[f64]| {
            let point = |(x, &y): (usize, &f64)| {
                let (x, tick, command) = (x as f64, String::new(), String::new());
                Point { x, tick, y, low: y, high: y, repetitions: 1, command }
            };
            let points = ys.iter().enumerate().map(point).collect();
            let filled = Filled {
                panel: *Panel::named("figure-8").unwrap(),
                model: "model".into(),
                series: vec![Series { name: "dense".into(), points }],
                failed: Vec::new(),
                absent: Vec::new(),
                missing: None,
            };
            svg(&filled).is_some()
        };
        assert!(drawn(&[1.0]) && drawn(&[0.0, 3.0]) && drawn(&[0.01, 3.0]) && drawn(&[0.0]));
        assert!(drawn(&[1e-9, 1e12]) && drawn(&[5e-324, 1.0]) && drawn(&[5e-324]));
        for ys in [&[][..], &[1.0, -1e12], &[1e13], &[f64::MAX, 1.0], &vec![1.0; MAX_POINTS + 1]] {
            assert!(!drawn(ys), "{ys:?}");
        }
    }

    #[test]
    fn numbers_are_short() {
        let all = [0.0, 0.1234, 1.5, 12.0, 12.34, 1234.5].map(short);
        assert_eq!(all, ["0", "0.123", "1.5", "12", "12.3", "1234"]);
    }
}
