//! A report as a picture: one bar a row from zero to p50, with a whisker from min to p99.

use crate::report::Report;

/// Pixels a character of a row's name takes at most.
const CHARACTER: f64 = 7.2;
const PLOT: f64 = 520.0;
const LINE: f64 = 26.0;

/// The report as an SVG document. Rows of different units are scaled apart.
pub fn draw(report: &Report) -> String {
    let mut report = report.clone();
    if report.name == crate::image::STARTS {
        report.rows.retain(crate::image::pivot::pictured);
    }
    let report = &report;
    let longest = report.rows.iter().map(|r| r.name.chars().count()).max();
    let label = 20.0 + CHARACTER * longest.unwrap_or(0) as f64;
    let height = LINE * (report.rows.len() + report.ratios.len()) as f64 + 60.0;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{}\" height=\"{height}\" font-family=\"sans-serif\" \
         font-size=\"13\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
         <text x=\"10\" y=\"20\" font-weight=\"bold\">{}</text>\n\
         <text x=\"10\" y=\"38\" fill=\"#666\" font-size=\"11\">{}</text>\n",
        label + PLOT + 130.0,
        escape(&format!("{} · {}", report.name, report.commit)),
        escape(&report.machine),
    );
    let mut y = 52.0;
    for row in &report.rows {
        let most = report
            .rows
            .iter()
            .filter(|r| r.unit == row.unit)
            .map(|r| r.p99)
            .fold(f64::MIN_POSITIVE, f64::max);
        let x = |v: f64| label + (v / most).clamp(0.0, 1.0) * PLOT;
        out += &format!(
            "<text x=\"{:.0}\" y=\"{:.0}\" text-anchor=\"end\">{}</text>\n\
             <rect x=\"{label}\" y=\"{:.0}\" width=\"{:.1}\" height=\"14\" fill=\"#4a90d9\"/>\n\
             <line x1=\"{:.1}\" x2=\"{:.1}\" y1=\"{:.0}\" y2=\"{:.0}\" stroke=\"#1b3a5c\" stroke-width=\"2\"/>\n\
             <text x=\"{:.0}\" y=\"{:.0}\" fill=\"#333\">{:.2} {}</text>\n",
            label - 8.0,
            y + 12.0,
            escape(&row.name),
            y,
            x(row.p50) - label,
            x(row.min),
            x(row.p99),
            y + 7.0,
            y + 7.0,
            label + PLOT + 8.0,
            y + 12.0,
            row.p50,
            escape(&row.unit),
        );
        y += LINE;
    }
    for (name, value) in &report.ratios {
        out += &format!(
            "<text x=\"10\" y=\"{:.0}\">{} = {value:.2}</text>\n",
            y + 12.0,
            escape(name)
        );
        y += LINE;
    }
    out + "</svg>\n"
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}
