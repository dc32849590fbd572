//! What a benchmark found, for people and for programs.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "printing is what this module is for")]

use crate::measure::Spread;
use serde::Serialize;
use std::fmt::Write as _;

/// Which way a metric should go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Better {
    /// The smaller the better.
    Lower,
    /// The larger the better.
    Higher,
}

/// One number.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Metric {
    /// What is measured.
    pub(crate) name: &'static str,
    /// The median, if it was measured several times.
    pub(crate) value: f64,
    /// `s`, `MiB`, `MB/s`, `B`, or `x` for a ratio.
    pub(crate) unit: &'static str,
    /// What it should reach, if anything.
    pub(crate) goal: Option<f64>,
    /// Which way is good.
    pub(crate) better: Better,
    /// Whose number it is, or whom it compares with.
    pub(crate) peer: Option<String>,
    /// Smallest and largest of several measurements.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) range: Option<(f64, f64)>,
}

impl Metric {
    /// A number measured once, without a goal.
    pub(crate) fn new(name: &'static str, value: f64, unit: &'static str, better: Better) -> Self {
        Self { name, value, unit, goal: None, better, peer: None, range: None }
    }

    /// A number measured several times.
    pub(crate) fn spread(name: &'static str, spread: Spread, unit: &'static str, better: Better) -> Self {
        Self { range: Some((spread.min, spread.max)), ..Self::new(name, spread.median, unit, better) }
    }

    /// With a goal.
    pub(crate) fn goal(self, goal: f64) -> Self {
        Self { goal: Some(goal), ..self }
    }

    /// With a peer.
    pub(crate) fn peer(self, peer: &str) -> Self {
        Self { peer: Some(peer.to_owned()), ..self }
    }

    /// Whether the goal is reached, if there is one.
    pub(crate) fn reached(&self) -> Option<bool> {
        self.goal.map(|goal| match self.better {
            Better::Lower => self.value <= goal,
            Better::Higher => self.value >= goal,
        })
    }
}

/// Something that was not measured, and what to do about it.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Missing {
    /// The peer or metric.
    pub(crate) name: String,
    /// Why it is missing and how to get it.
    pub(crate) how: String,
}

/// All that one benchmark found.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    /// Its name.
    pub(crate) bench: &'static str,
    /// What was measured on what.
    pub(crate) setting: Vec<String>,
    /// The numbers.
    pub(crate) metrics: Vec<Metric>,
    /// What is not among them.
    pub(crate) missing: Vec<Missing>,
}

impl Report {
    /// Prints it to standard output, as JSON or as a table.
    pub(crate) fn print(&self, json: bool) -> anyhow::Result<()> {
        if json {
            println!("{}", serde_json::to_string_pretty(self)?);
        } else {
            print!("{}", self.table());
        }
        Ok(())
    }

    fn table(&self) -> String {
        let header = ["metric", "of, or over", "median", "unit", "least..most", "goal", ""].map(str::to_owned);
        let rows: Vec<[String; 7]> = std::iter::once(header).chain(self.metrics.iter().map(row)).collect();
        let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
        let widths: [usize; 7] = std::array::from_fn(width);
        let mut text = format!("{}\n", self.bench);
        for line in &self.setting {
            text.push_str(&format!("  {line}\n"));
        }
        text.push('\n');
        for row in &rows {
            let mut line = String::from(" ");
            for (n, (cell, width)) in row.iter().zip(widths).enumerate() {
                // Writing to a string cannot fail.
                let _ = if n == 2 { write!(line, " {cell:>width$} ") } else { write!(line, " {cell:<width$} ") };
            }
            text.push_str(line.trim_end());
            text.push('\n');
        }
        for missing in &self.missing {
            text.push_str(&format!("\n  not measured: {}: {}", missing.name, missing.how));
        }
        text.push('\n');
        text
    }
}

fn row(metric: &Metric) -> [String; 7] {
    let goal = metric.goal.map_or_else(String::new, |goal| {
        let sign = if metric.better == Better::Lower { "<=" } else { ">=" };
        format!("{sign} {}", number(goal))
    });
    let reached = metric.reached().map_or("", |reached| if reached { "reached" } else { "MISSED" });
    [
        metric.name.to_owned(),
        metric.peer.clone().unwrap_or_default(),
        number(metric.value),
        metric.unit.to_owned(),
        metric.range.map_or_else(String::new, |(min, max)| format!("{}..{}", number(min), number(max))),
        goal,
        reached.to_owned(),
    ]
}

/// Three significant digits, or all of them before the point.
fn number(value: f64) -> String {
    match value.abs() {
        v if v >= 99.95 => format!("{value:.0}"),
        v if v >= 9.995 => format!("{value:.1}"),
        v if v >= 0.9995 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}

/// Says on standard error what is going on.
pub(crate) fn progress(line: &str) {
    eprintln!("{line}");
}

/// Prints a line to standard output.
pub(crate) fn line(line: &str) {
    println!("{line}");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        let spread = Spread { median: 1.234_56, min: 1.0, max: 12.0 };
        Report {
            bench: "x",
            setting: vec!["a machine".to_owned()],
            metrics: vec![
                Metric::spread("ratio", spread, "x", Better::Lower).goal(1.2).peer("limit"),
                Metric::new("speed", 1234.5, "MB/s", Better::Higher).goal(1000.0),
                Metric::new("plain", 0.5, "s", Better::Lower),
            ],
            missing: vec![Missing { name: "tool".to_owned(), how: "install it".to_owned() }],
        }
    }

    #[test]
    fn goals_have_a_direction() {
        let reached: Vec<_> = report().metrics.iter().map(Metric::reached).collect();
        assert_eq!(reached, [Some(false), Some(true), None]);
    }

    #[test]
    fn the_table_says_it_all() {
        let table = report().table();
        let lines: Vec<_> = table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
        assert!(lines.contains(&"ratio limit 1.23 x 1.00..12.0 <= 1.20 MISSED".to_owned()), "{table}");
        assert!(lines.contains(&"speed 1234 MB/s >= 1000 reached".to_owned()), "{table}");
        assert!(lines.contains(&"not measured: tool: install it".to_owned()), "{table}");
    }

    #[test]
    fn the_json_has_the_agreed_keys() {
        let json = serde_json::to_value(report()).unwrap();
        assert_eq!(json["bench"], "x");
        assert_eq!(json["metrics"][0]["better"], "lower");
        assert_eq!(json["metrics"][0]["peer"], "limit");
        assert_eq!(json["metrics"][1]["goal"], 1000.0);
        assert!(json["metrics"][2]["goal"].is_null() && json["metrics"][2]["peer"].is_null());
    }
}
