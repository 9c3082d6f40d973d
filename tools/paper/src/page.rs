//! The report: one file of HTML that needs nothing else.

use crate::panels::{Filled, Point, Shape};
use crate::plot::{short, svg};
use crate::runner::Machine;
use std::collections::BTreeMap;
use std::fmt::Write;

const STYLE: &str = "\
:root{color-scheme:light dark;--ink:#1b1f24;--page:#fff;--soft:#57606a;--line:#d0d7de;--card:#f6f8fa}\
@media(prefers-color-scheme:dark){:root{--ink:#e6edf3;--page:#0d1117;--soft:#9aa4af;--line:#30363d;--card:#161b22}}\
*{box-sizing:border-box}body{font:16px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--page);max-width:60rem;margin:0 auto;padding:1.5rem}\
h1{font-size:1.6rem}h2{font-size:1.3rem;margin-top:3rem}h3{font-size:1.05rem;margin:0 0 .5rem}\
section{border:1px solid var(--line);border-radius:8px;padding:1rem;margin:1rem 0;overflow-x:auto}\
.plot{background:#fff;border-radius:6px}.plot svg{width:100%;height:auto;display:block}\
table{border-collapse:collapse;font-size:.9rem}th,td{padding:.3rem .7rem;border-bottom:1px solid var(--line);text-align:right}\
th:first-child,td:first-child{text-align:left}small,.soft{color:var(--soft)}\
pre{background:var(--card);padding:.6rem;border-radius:6px;overflow-x:auto;font-size:.8rem}\
nav{columns:2;font-size:.9rem}nav a{display:block}a{color:#2f81f7}.missing{font-style:italic}";

/// The page of all panels.
#[must_use]
pub fn page(filled: &[Filled], machine: &Machine, notes: &[String]) -> String {
    let mut html = String::new();
    html += "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\">";
    html += "<meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">";
    html += "<title>LeanStream: the paper's tables and figures</title>";
    put(&mut html, format_args!("<style>{STYLE}</style></head><body>"));
    html += "<h1>LeanStream: the paper's tables and figures, measured here</h1>";
    let memory = machine.memory_bytes as f64 / f64::from(1u32 << 30);
    put(
        &mut html,
        format_args!(
            "<p>{}, {} cores, {memory:.1} GiB, Linux {}. Each point is the median of its repetitions; whiskers and brackets reach \
             from the smallest to the largest. The command of each number is below its panel.</p>",
            escaped(&machine.processor),
            machine.cores,
            escaped(&machine.kernel),
        ),
    );
    for note in notes {
        put(&mut html, format_args!("<p>{}</p>", words(note)));
    }
    let mut model = "";
    for (index, panel) in filled.iter().enumerate() {
        if panel.model != model {
            model = &panel.model;
            put(&mut html, format_args!("<h2>{}</h2><nav>", escaped(model)));
            for (place, other) in
                filled.iter().enumerate().filter(|(_, other)| other.model == model)
            {
                let title = escaped(other.panel.title);
                put(&mut html, format_args!("<a href=\"#p{place}\">{title}</a>"));
            }
            html += "</nav>";
            let own = |other: &&Filled| other.model == model && other.panel.id == "steadiness";
            if let Some((low, high, count)) = filled.iter().find(own).and_then(Filled::spread) {
                let (low, high) = (short(low), short(high));
                put(
                    &mut html,
                    format_args!(
                        "<p>Over this run the same command reached {low} to {high} tokens/s, {count} times: no speed below is more \
                         exact than that.</p>"
                    ),
                );
            }
        }
        section(&mut html, index, panel);
    }
    html + "</body></html>\n"
}

fn section(html: &mut String, index: usize, filled: &Filled) {
    let panel = &filled.panel;
    put(html, format_args!("<section id=\"p{index}\"><h3>{}</h3>", escaped(panel.title)));
    put(html, format_args!("<p class=\"soft\">{}</p>", words(panel.here)));
    if let Some(svg) = svg(filled) {
        put(html, format_args!("<div class=\"plot\">{svg}</div>"));
    }
    if let Some(missing) = filled.missing {
        put(html, format_args!("<p class=\"missing\">Nothing here: {}</p>", words(missing)));
    } else if panel.shape == Shape::Table {
        *html += &table(filled);
    } else {
        put(html, format_args!("<details><summary>Numbers</summary>{}</details>", table(filled)));
    }
    for absent in &filled.absent {
        let (name, why) = (absent.name, words(&absent.why));
        put(html, format_args!("<p class=\"missing\">{name} is missing: {why}</p>"));
    }
    put(html, format_args!("<p><small>The paper: {}</small></p>", words(panel.paper)));
    let mut commands: Vec<&str> =
        filled.series.iter().flat_map(|s| &s.points).map(|point| point.command.as_str()).collect();
    commands.dedup();
    if !commands.is_empty() {
        let text = escaped(&commands.join("\n"));
        put(html, format_args!("<details><summary>Commands</summary><pre>{text}</pre></details>"));
    }
    if !filled.failed.is_empty() {
        *html += "<details><summary>Commands that gave nothing</summary><pre>";
        for (command, error) in &filled.failed {
            put(html, format_args!("{}\n  {}\n", escaped(command), escaped(error)));
        }
        *html += "</pre></details>";
    }
    *html += "</section>\n";
}

/// Rows are series, columns the places that any of them has; both found by the bits of x, as none is negative.
fn table(filled: &Filled) -> String {
    let mut columns: BTreeMap<u64, &Point> = BTreeMap::new();
    for point in filled.series.iter().flat_map(|series| &series.points) {
        columns.entry(point.x.to_bits()).or_insert(point);
    }
    let mut html = String::from("<table><tr><th></th>");
    for Point { x, tick, .. } in columns.values() {
        let head = if tick.is_empty() { short(*x) } else { escaped(tick) };
        put(&mut html, format_args!("<th>{head}</th>"));
    }
    html += "</tr>";
    for series in &filled.series {
        put(&mut html, format_args!("<tr><td>{}</td>", escaped(&series.name)));
        let points: BTreeMap<u64, &Point> =
            series.points.iter().map(|point| (point.x.to_bits(), point)).collect();
        for x in columns.keys() {
            let cell = points.get(x).map_or(String::new(), |point| cell(point));
            put(&mut html, format_args!("<td>{cell}</td>"));
        }
        html += "</tr>";
    }
    html + "</table>"
}

fn cell(point: &Point) -> String {
    let [y, low, high] = [point.y, point.low, point.high].map(short);
    if point.repetitions > 1 { format!("{y} <small>({low} to {high})</small>") } else { y }
}

fn put(html: &mut String, text: std::fmt::Arguments<'_>) {
    html.write_fmt(text).expect("a string takes all");
}

/// With what stands between backticks as code.
fn words(text: &str) -> String {
    let part = |(place, part): (usize, &str)| match place % 2 {
        0 => escaped(part),
        _ => format!("<code>{}</code>", escaped(part)),
    };
    text.split('`').enumerate().map(part).collect()
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::panels::{Panel, Series};

    #[test]
    fn cells_have_medians_with_their_spread_below_the_place_of_each() {
        let point = |x, y, repetitions| {
            let (tick, command) = (format!("<{x}>"), String::new());
            Point { x, tick, y, low: y - 1.0, high: y + 1.0, repetitions, command }
        };
        let series = |name: &str, points| Series { name: name.into(), points };
        let filled = Filled {
            panel: *Panel::named("table-4").unwrap(),
            model: "model".into(),
            series: vec![
                series("LRU", vec![point(2.0, 20.0, 3)]),
                series("LFU", vec![point(1.0, 10.0, 1), point(2.0, 30.0, 1)]),
            ],
            failed: Vec::new(),
            absent: Vec::new(),
            missing: None,
        };
        let wanted = "<table><tr><th></th><th>&lt;1&gt;</th><th>&lt;2&gt;</th></tr>\
                      <tr><td>LRU</td><td></td><td>20 <small>(19 to 21)</small></td></tr>\
                      <tr><td>LFU</td><td>10</td><td>30</td></tr></table>";
        assert_eq!(table(&filled), wanted);
    }
}
