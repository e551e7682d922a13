//! What a benchmark found: rows of percentiles, ratios of medians, and the samples they were computed from.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// One measured quantity, sample by sample.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Series {
    pub name: String,
    pub unit: String,
    pub samples: Vec<f64>,
}

/// The summary of one [`Series`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    pub name: String,
    pub unit: String,
    /// Number of samples.
    pub n: usize,
    pub p50: f64,
    pub p95: f64,
    pub p99: f64,
    pub min: f64,
    pub max: f64,
}

/// One benchmark's result.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// The benchmark: `boot` for `make bench-boot`.
    #[serde(skip)]
    pub name: String,
    pub machine: String,
    pub commit: String,
    /// The build profile of the benchmark's programs: `release` or `debug`. `None` in results that do not say.
    #[serde(default)]
    pub profile: Option<String>,
    pub rows: Vec<Row>,
    pub ratios: BTreeMap<String, f64>,
    /// What a reader must know to understand rows and ratios.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    #[serde(skip)]
    series: Vec<Series>,
}

impl Report {
    /// An empty report on this machine, commit and build profile.
    pub fn new(name: &str) -> Report {
        Report {
            name: name.into(),
            machine: crate::machine::describe(),
            commit: crate::machine::commit(),
            profile: Some(crate::machine::profile().into()),
            rows: Vec::new(),
            ratios: BTreeMap::new(),
            notes: Vec::new(),
            series: Vec::new(),
        }
    }

    /// That of `directory` with its samples, to be added to. An empty one where there is none, or it is of another machine,
    /// commit or build profile.
    pub fn resume(name: &str, directory: &Path) -> std::io::Result<Report> {
        let new = Report::new(name);
        let json = directory.join(format!("{name}.json"));
        if !json.exists() {
            return Ok(new);
        }
        let mut report = Report::read(&json)?;
        let origin = |report: &Report| {
            (
                report.machine.clone(),
                report.commit.clone(),
                report.profile.clone(),
            )
        };
        if origin(&report) != origin(&new) {
            return Ok(new);
        }
        report.series =
            serde_json::from_slice(&std::fs::read(directory.join(format!("{name}.samples.json")))?)?;
        Ok(report)
    }

    /// Adds one sample to the series `name`, which keeps the order in which names were first seen. Three decimals are
    /// kept.
    pub fn sample(&mut self, name: &str, unit: &str, value: f64) {
        let value = (value * 1e3).round() / 1e3;
        match self.series.iter_mut().find(|s| s.name == name) {
            Some(series) => series.samples.push(value),
            None => self.series.push(Series {
                name: name.into(),
                unit: unit.into(),
                samples: vec![value],
            }),
        }
    }

    /// Sets `ratio` to the median of `numerator` over the median of `denominator`, both already sampled.
    pub fn ratio(&mut self, ratio: &str, numerator: &str, denominator: &str) -> Result<(), String> {
        self.ratio_of(ratio, (numerator, 50.0), (denominator, 50.0))
    }

    /// As [`Self::ratio`], of any percentiles (0 to 100).
    pub fn ratio_of(
        &mut self,
        ratio: &str,
        numerator: (&str, f64),
        denominator: (&str, f64),
    ) -> Result<(), String> {
        let value = self.percentile(numerator)? / self.percentile(denominator)?;
        self.ratios.insert(ratio.into(), value);
        Ok(())
    }

    /// A percentile of a series already sampled.
    pub fn percentile(&self, (name, p): (&str, f64)) -> Result<f64, String> {
        let series = self.series.iter().find(|s| s.name == name);
        series
            .map(|s| percentile(&sorted(&s.samples), p))
            .ok_or(format!("no samples of {name}"))
    }

    /// Adds a sentence shown below the ratios, once.
    pub fn note(&mut self, text: impl Into<String>) {
        let text = text.into();
        if !self.notes.contains(&text) {
            self.notes.push(text);
        }
    }

    /// Computes the rows.
    pub fn summarise(&mut self) {
        self.rows = self.series.iter().map(Series::row).collect();
    }

    /// Computes the rows, writes the three files into `directory` and returns the JSON's path.
    pub fn write(&mut self, directory: &Path) -> std::io::Result<PathBuf> {
        self.summarise();
        std::fs::create_dir_all(directory)?;
        let json = directory.join(format!("{}.json", self.name));
        std::fs::write(&json, serde_json::to_string_pretty(self)? + "\n")?;
        let samples = directory.join(format!("{}.samples.json", self.name));
        std::fs::write(samples, serde_json::to_string(&self.series)? + "\n")?;
        std::fs::write(
            directory.join(format!("{}.svg", self.name)),
            crate::svg::draw(self),
        )?;
        Ok(json)
    }

    /// Writes what was measured until now into `target/bench`: it is kept, whatever comes after.
    pub fn keep(&mut self) -> Result<(), String> {
        let written = self.write(Path::new("target/bench"));
        written
            .map(drop)
            .map_err(|e| format!("cannot write target/bench: {e}"))
    }

    /// Reads what [`Report::write`] wrote.
    pub fn read(path: &Path) -> std::io::Result<Report> {
        let mut report: Report = serde_json::from_slice(&std::fs::read(path)?)?;
        report.name = path
            .file_stem()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        Ok(report)
    }
}

impl Series {
    fn row(&self) -> Row {
        let sorted = sorted(&self.samples);
        Row {
            name: self.name.clone(),
            unit: self.unit.clone(),
            n: sorted.len(),
            p50: percentile(&sorted, 50.0),
            p95: percentile(&sorted, 95.0),
            p99: percentile(&sorted, 99.0),
            min: sorted[0],
            max: sorted[sorted.len() - 1],
        }
    }
}

/// Bytes as MiB.
pub fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

fn sorted(samples: &[f64]) -> Vec<f64> {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted
}

/// Nearest-rank percentile of a non-empty sorted slice.
fn percentile(sorted: &[f64], p: f64) -> f64 {
    let rank = (p / 100.0 * sorted.len() as f64).ceil() as usize;
    sorted[rank.clamp(1, sorted.len()) - 1]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_nearest_rank() {
        let v: Vec<f64> = (1..=100).map(f64::from).collect();
        assert_eq!([50.0, 95.0, 99.0].map(|p| percentile(&v, p)), [50.0, 95.0, 99.0]);
        assert_eq!(percentile(&[7.0], 99.0), 7.0);
        assert_eq!(percentile(&[1.0, 2.0, 3.0], 50.0), 2.0);
    }

    #[test]
    fn a_report_reads_back_and_its_ratio_is_of_medians() {
        let mut report = Report::new("t");
        for (a, b) in [(2.0, 1.0), (4.0, 2.0), (100.0, 3.0)] {
            report.sample("a", "ms", a);
            report.sample("b", "ms", b);
        }
        report.ratio("a_over_b", "a", "b").unwrap();
        assert!(report.ratio("x", "a", "none").is_err());
        let dir = tempdir();
        let path = report.write(&dir).unwrap();
        let read = Report::read(&path).unwrap();
        let mut more = Report::resume("t", &dir).unwrap();
        more.sample("a", "ms", 6.0);
        more.ratio("a_over_b", "a", "b").unwrap();
        assert_eq!(more.percentile(("a", 100.0)), Ok(100.0));
        more.summarise();
        assert_eq!(
            (more.rows[0].n, more.rows[1].n, more.ratios["a_over_b"]),
            (4, 3, 2.0)
        );
        more.commit.push('x');
        more.write(&dir).unwrap();
        assert!(Report::resume("t", &dir).unwrap().series.is_empty());
        std::fs::remove_dir_all(&dir).unwrap();
        assert_eq!(read.ratios["a_over_b"], 2.0);
        assert_eq!(
            (read.rows[0].n, read.rows[0].max, read.name.as_str()),
            (3, 100.0, "t")
        );
    }

    fn tempdir() -> PathBuf {
        let dir = std::env::temp_dir().join(format!("thaw-bench-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        dir
    }
}
