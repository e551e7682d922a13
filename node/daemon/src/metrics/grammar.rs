//! A strict parser of Prometheus's text format, for tests: invalid or contradictory text is an error.

use std::collections::{BTreeMap, BTreeSet};

/// A parsed family.
#[derive(Debug, Default)]
pub struct Read {
    pub help: String,
    pub kind: String,
    pub samples: Vec<Sample>,
}

/// One line.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    pub name: String,
    pub labels: BTreeMap<String, String>,
    pub value: f64,
}

impl Read {
    /// The value of the sample that has these labels, among others.
    pub fn value(&self, labels: &[(&str, &str)]) -> Option<f64> {
        let has = |s: &&Sample| {
            labels
                .iter()
                .all(|(n, v)| s.labels.get(*n).is_some_and(|l| l == v))
        };
        self.samples.iter().find(has).map(|s| s.value)
    }

    /// The names of its samples' labels, but for the bounds of buckets.
    pub fn label_names(&self) -> BTreeSet<&str> {
        let names = self.samples.iter().flat_map(|s| s.labels.keys());
        names.map(String::as_str).filter(|n| *n != "le").collect()
    }
}

/// The families of an exposition, by name.
pub fn read(text: &str) -> Result<BTreeMap<String, Read>, String> {
    if !text.ends_with('\n') {
        return Err("the last line does not end".into());
    }
    let mut families: BTreeMap<String, Read> = BTreeMap::new();
    let (mut current, mut seen) = (String::new(), BTreeSet::new());
    for line in text.lines() {
        let wrong = |what: &str| format!("{what}: {line}");
        if let Some(rest) = line.strip_prefix("# HELP ") {
            let (name, help) = rest.split_once(' ').ok_or_else(|| wrong("no help"))?;
            check_name(name, true).map_err(|e| wrong(&e))?;
            let family = Read {
                help: help.into(),
                ..Read::default()
            };
            if families.insert(name.into(), family).is_some() {
                return Err(wrong("a family twice"));
            }
            current = name.into();
        } else if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').ok_or_else(|| wrong("no type"))?;
            let family = families.get_mut(name).filter(|_| name == current);
            let family = family.ok_or_else(|| wrong("a type without its help before it"))?;
            if !matches!(kind, "counter" | "gauge" | "histogram") || !family.kind.is_empty() {
                return Err(wrong("a bad type"));
            }
            family.kind = kind.into();
        } else {
            let sample = sample(line).map_err(|e| wrong(&e))?;
            let family = families
                .get_mut(&current)
                .ok_or_else(|| wrong("a sample of no family"))?;
            let suffix = sample.name.strip_prefix(&current);
            let good = match family.kind.as_str() {
                "histogram" => matches!(suffix, Some("_bucket" | "_sum" | "_count")),
                "counter" => suffix == Some("") && current.ends_with("_total") && sample.value >= 0.0,
                "gauge" => suffix == Some("") && !current.ends_with("_total"),
                _ => false,
            };
            if !good {
                return Err(wrong("not a sample of its family"));
            }
            if !seen.insert((sample.name.clone(), sample.labels.clone())) {
                return Err(wrong("a sample twice"));
            }
            family.samples.push(sample);
        }
    }
    for (name, family) in &families {
        if family.samples.is_empty() {
            return Err(format!("{name} has no samples"));
        }
        if family.kind == "histogram" {
            check_histogram(name, family)?;
        }
    }
    Ok(families)
}

fn check_name(name: &str, colons: bool) -> Result<(), String> {
    let first = |c: char| c.is_ascii_alphabetic() || c == '_' || (colons && c == ':');
    let good = name.starts_with(first) && name.chars().all(|c| first(c) || c.is_ascii_digit());
    match good {
        true => Ok(()),
        false => Err(format!("a bad name {name:?}")),
    }
}

fn sample(line: &str) -> Result<Sample, String> {
    let end = line.find(['{', ' ']).ok_or("no value")?;
    let (name, mut rest) = line.split_at(end);
    check_name(name, true)?;
    let mut labels = BTreeMap::new();
    if let Some(inside) = rest.strip_prefix('{') {
        rest = inside;
        loop {
            if let Some(after) = rest.strip_prefix('}') {
                rest = after;
                break;
            }
            let (label, value) = rest.split_once("=\"").ok_or("a label without a value")?;
            check_name(label, false)?;
            let (value, after) = quoted(value)?;
            if labels.insert(label.to_owned(), value).is_some() {
                return Err("a label twice".into());
            }
            rest = match after.strip_prefix(',') {
                Some(next) => next,
                None if after.starts_with('}') => after,
                None => return Err("labels do not end".into()),
            };
        }
    }
    let value = rest.strip_prefix(' ').ok_or("no value")?;
    let value = match value {
        "+Inf" | "inf" => f64::INFINITY,
        text => text.parse().map_err(|_| "a bad value")?,
    };
    Ok(Sample {
        name: name.into(),
        labels,
        value,
    })
}

/// A label's value up to its closing quote, and what follows.
fn quoted(text: &str) -> Result<(String, &str), String> {
    let mut value = String::new();
    let mut characters = text.char_indices();
    while let Some((at, character)) = characters.next() {
        match character {
            '"' => return Ok((value, &text[at + 1..])),
            '\\' => match characters.next() {
                Some((_, 'n')) => value.push('\n'),
                Some((_, c @ ('"' | '\\'))) => value.push(c),
                _ => return Err("a bad escape".into()),
            },
            c => value.push(c),
        }
    }
    Err("a value without an end".into())
}

/// Every series of a histogram has growing bounds up to +Inf, counts that do not shrink, and a count and a sum.
fn check_histogram(name: &str, family: &Read) -> Result<(), String> {
    let mut series: BTreeMap<Vec<(String, String)>, Vec<&Sample>> = BTreeMap::new();
    for sample in &family.samples {
        let mut labels = sample.labels.clone();
        labels.remove("le");
        series
            .entry(labels.into_iter().collect())
            .or_default()
            .push(sample);
    }
    for (labels, samples) in series {
        let wrong = |what: &str| format!("{name} {labels:?}: {what}");
        let (mut bound, mut below) = (f64::NEG_INFINITY, 0.0);
        let of = |suffix: &'static str| {
            let full = format!("{name}{suffix}");
            samples.iter().filter(move |s| s.name == full)
        };
        for bucket in of("_bucket") {
            let le = bucket.labels.get("le").ok_or_else(|| wrong("no bound"))?;
            let le = match le.as_str() {
                "+Inf" => f64::INFINITY,
                text => text.parse().map_err(|_| wrong("a bad bound"))?,
            };
            if le <= bound || bucket.value < below {
                return Err(wrong("buckets out of order"));
            }
            (bound, below) = (le, bucket.value);
        }
        let count: Vec<f64> = of("_count").map(|s| s.value).collect();
        if bound != f64::INFINITY || count != [below] || of("_sum").count() != 1 {
            return Err(wrong("not a whole histogram"));
        }
    }
    Ok(())
}

#[test]
fn what_is_not_by_the_grammar_is_refused() {
    let head = "# HELP a_total b\n# TYPE a_total counter\n";
    read(&format!("{head}a_total{{x=\"1\\\"\\n\\\\\",}} 1\n")).unwrap();
    for bad in [
        "a_total 1",
        "a_total{x=\"1} 1\n",
        "a_total{x=1} 1\n",
        "a_total{x=\"\\q\"} 1\n",
        "a_total{x=\"1\",x=\"2\"} 1\n",
        "a_total{1x=\"1\"} 1\n",
        "a_total one\n",
        "b_total 1\n",
        "a_total 1\na_total 2\n",
        "",
    ] {
        read(&format!("{head}{bad}")).unwrap_err();
    }
    let head = "# HELP h b\n# TYPE h histogram\n";
    read(&format!(
        "{head}h_bucket{{le=\"1\"}} 1\nh_bucket{{le=\"+Inf\"}} 2\nh_sum 1\nh_count 2\n"
    ))
    .unwrap();
    for bad in [
        "h_bucket{le=\"1\"} 1\nh_sum 1\nh_count 1\n",
        "h_bucket{le=\"1\"} 3\nh_bucket{le=\"+Inf\"} 2\nh_sum 1\nh_count 2\n",
        "h_bucket{le=\"+Inf\"} 2\nh_sum 1\nh_count 3\n",
        "h_bucket{le=\"+Inf\"} 2\nh_count 2\n",
    ] {
        read(&format!("{head}{bad}")).unwrap_err();
    }
}
